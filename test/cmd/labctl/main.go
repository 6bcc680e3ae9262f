// Command labctl raises the lab for a shell, for the demo, or for any other program.
//
//	labctl up [-forward] [-log] [-cache] [-kube-proxy] -- COMMAND...   raise, run COMMAND, tear down
//	labctl exec NODE COMMAND...                                        inside: run COMMAND in a node
//
// COMMAND runs on the machine itself, with the lab described in its environment: LAB is the path of labctl, and
// LAB_PID_<node>, with every other character than a letter or digit as "_", the process that holds a node's namespaces.
// So `labctl up -- sh -c '"$LAB" exec host0 dig @172.20.0.10 backend.default.svc.cluster.local'`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/test/lab"
)

const usage = `usage: labctl up [-forward] [-log] [-cache] [-kube-proxy] -- COMMAND...
       labctl exec NODE COMMAND...   (inside a lab; nodes: host0 worker0 pod-coredns-0 pod-coredns-1 pod-app ext)
`

var errUsage = errors.New("wrong usage")

func main() {
	err := run(os.Args[1:])
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.Is(err, errUsage):
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	case errors.As(err, &exit): // the command has said itself what was wrong
		os.Exit(max(1, exit.ExitCode()))
	default:
		fmt.Fprintln(os.Stderr, "labctl:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	switch args[0] {
	case "up":
		return up(args[1:])
	case "exec":
		return enter(args[1:])
	}
	return errUsage
}

func up(args []string) error {
	var options lab.Options
	flags := flag.NewFlagSet("up", flag.ContinueOnError)
	flags.Usage = func() {}
	flags.BoolVar(&options.CoreDNSForwards, "forward", false, "")
	flags.BoolVar(&options.LogQueries, "log", false, "")
	flags.BoolVar(&options.CoreDNSCache, "cache", false, "")
	kubeProxy := flags.Bool("kube-proxy", false, "")
	if err := flags.Parse(args); err != nil || flags.NArg() == 0 {
		return errUsage
	}
	// The first signal ends the raising; while the command runs it is the command's (the terminal sends it to both),
	// and the lab is torn down once the command has ended.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	l, err := lab.New(ctx, options)
	if err != nil {
		return err
	}
	if *kubeProxy {
		if err := l.LoadKubeProxyLikeRules(ctx); err != nil {
			return errors.Join(err, l.Close())
		}
	}
	self, err := os.Executable()
	if err != nil {
		return errors.Join(err, l.Close())
	}
	cmd := exec.CommandContext(ctx, flags.Arg(0), flags.Args()[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "LAB="+self)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	for _, n := range l.Nodes() {
		cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d", variable(n.Name()), n.PID()))
	}
	return errors.Join(cmd.Run(), l.Close())
}

func variable(node string) string {
	return "LAB_PID_" + strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, node)
}

// enter becomes the command, by way of nsenter, in the namespaces of a node.
func enter(args []string) error {
	if len(args) < 2 {
		return errUsage
	}
	pid := os.Getenv(variable(args[0]))
	if pid == "" {
		return fmt.Errorf("no node %q: is this inside `labctl up`? %s is not set", args[0], variable(args[0]))
	}
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		return fmt.Errorf("%w: install util-linux", err)
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	// A shell changes the directory, for not every nsenter in use can do it inside the new namespaces.
	argv := []string{"nsenter", "-t", pid, "-n", "-m", "-p", "-u", "--", "sh", "-c", `cd "$0" && exec "$@"`, dir}
	err = syscall.Exec(nsenter, append(argv, args[1:]...), os.Environ())
	return fmt.Errorf("run nsenter: %w", err)
}
