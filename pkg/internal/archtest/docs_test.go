package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	cited   = regexp.MustCompile("`((?:Test|Fuzz)[A-Z][A-Za-z0-9]*)`")
	defined = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Z]\w*)\(`)
)

// A test that a document names as the proof of what it says is there.
func TestCitedTestsExist(t *testing.T) {
	tests := make(map[string]bool)
	for _, top := range []string{"pkg", "test"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			content, err := os.ReadFile(path)
			for _, match := range defined.FindAllSubmatch(content, -1) {
				tests[string(match[1])] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(documents) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	for _, document := range documents {
		content, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range cited.FindAllSubmatch(content, -1) {
			if name := string(match[1]); !tests[name] {
				t.Errorf("%s names %s, which does not exist", document, name)
			}
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	outside = regexp.MustCompile(`\b(DESIGN|CACHE|PEERS|RESOLVER|STYLE|K2S|KUBERNETES)\.md\b`)
)

// What a document links to is in the tree, and no document refers to one that is not.
func TestDocumentsStandAlone(t *testing.T) {
	top, err := filepath.Glob(filepath.Join(root, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	docs, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(top) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	for _, document := range append(top, docs...) {
		content, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range link.FindAllSubmatch(content, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(document), string(match[1]))); err != nil {
				t.Errorf("%s links to %s: %v", document, match[1], err)
			}
		}
		if match := outside.Find(content); match != nil {
			t.Errorf("%s refers to %s, which is not in the tree", document, match)
		}
	}
}
