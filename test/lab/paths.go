package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Root is the top directory of the repository, found upwards of the working directory.
func Root() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "test", "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find the repository above %s: no test/go.mod there: run from inside it", start)
		}
	}
}

// Helper finds a program that `make helpers` built into test/bin, such as "coredns", "goresolve" or "muslresolve".
func Helper(name string) (string, error) {
	return built("make helpers", "test", "bin", name)
}

// Binary finds the program under test; K2S_DNSBPF replaces the one that `make build` built.
func Binary() (string, error) {
	if path := os.Getenv("K2S_DNSBPF"); path != "" {
		return filepath.Abs(path)
	}
	return built("make build", "bin", "k2s-dnsbpf")
}

func built(remedy string, elements ...string) (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	path := filepath.Join(append([]string{root}, elements...)...)
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("%s is not built: run `%s`", path, remedy)
		}
		return "", err
	}
	return path, nil
}
