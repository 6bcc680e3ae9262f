// Command kube is the Kubernetes that the lab runs: the real etcd, kube-apiserver, kube-controller-manager and
// kube-proxy in one file, which saves three links of more than a hundred megabytes. The first argument says which one
// it is; all others are that program's own flags.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	var role string
	if len(os.Args) > 1 {
		role = os.Args[1]
		os.Args = os.Args[1:] // as if the role had been the program's name
	}
	var command *cobra.Command
	switch role {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "kube-apiserver":
		command = apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		command = controllers.NewControllerManagerCommand()
	case "kube-proxy":
		command = proxy.NewProxyCommand()
	default:
		fmt.Fprintln(os.Stderr, "usage: kube etcd|kube-apiserver|kube-controller-manager|kube-proxy FLAGS")
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}
