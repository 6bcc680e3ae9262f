// Package coherence holds what the product says of changes in a cluster to what a real apiserver and a real CoreDNS do, and
// measures what it costs. It uses the product's packages, in processes of their own in the lab.
package coherence

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/coherence"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/cluster"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/discovery"
)

const zone = "cluster.local"

// modeEnv and configEnv turn this binary into a process that follows a cluster.
const modeEnv, configEnv = "K2S_FOLLOW_MODE", "K2S_FOLLOW_KUBECONFIG"

// The modes of a follower. All follow the cluster's DNS as the daemon does, but for modeFull.
const (
	modeNone    = "none"    // nothing else
	modeCompact = "compact" // what names depend on, in a coherence.State
	modePrint   = "print"   // and says each change, one in a line
	modeFull    = "full"    // Services and EndpointSlices as they are, in shared informers, as kube-proxy does
)

func TestMain(m *testing.M) {
	if mode := os.Getenv(modeEnv); mode != "" {
		ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		err := follow(ctx, mode, os.Getenv(configEnv))
		cancel()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// follow says "synced" in a line of its own whenever all is known.
func follow(ctx context.Context, mode, kubeconfig string) error {
	if mode == modeFull {
		return followFull(ctx, kubeconfig)
	}
	options := discovery.Options{Kubeconfig: kubeconfig, NoCorefile: true, NoPodCIDRs: true, NoServiceCIDRs: true}
	if mode != modeNone {
		var mu sync.Mutex
		state, out := coherence.New(zone), json.NewEncoder(os.Stdout)
		options.Changes = func(c cluster.Change) {
			mu.Lock()
			defer mu.Unlock()
			state.Apply(c)
			if mode == modePrint {
				_ = out.Encode(c) // the test that reads it may have ended
			} else if c.Kind == cluster.KindSynced {
				fmt.Println("synced")
			}
		}
	}
	watcher, err := discovery.New(options)
	if err != nil {
		return err
	}
	if mode == modeNone {
		go func() {
			if _, err := watcher.WaitForSync(ctx); err == nil {
				fmt.Println("synced")
			}
		}()
	}
	return watcher.Run(ctx)
}

func followFull(ctx context.Context, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	// kube-proxy's own selectors.
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.LabelSelector = "!" + corev1.IsHeadlessService + ",!service.kubernetes.io/service-proxy-name"
	}))
	factory.Core().V1().Services().Informer()
	factory.Discovery().V1().EndpointSlices().Informer()
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	fmt.Println("synced")
	<-ctx.Done()
	return nil
}
