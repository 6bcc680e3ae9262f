package netdev

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"
)

// Changes sends a value after interfaces, addresses or routes have changed, until ctx ends. Changes that come while
// one is waiting to be received are the same value: the receiver looks at the state anew in any case.
func Changes(ctx context.Context) (<-chan struct{}, error) {
	links := make(chan netlink.LinkUpdate)
	addresses := make(chan netlink.AddrUpdate)
	routes := make(chan netlink.RouteUpdate)
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		return nil, fmt.Errorf("follow interfaces: %w", err)
	}
	if err := netlink.AddrSubscribe(addresses, ctx.Done()); err != nil {
		return nil, fmt.Errorf("follow addresses: %w", err)
	}
	if err := netlink.RouteSubscribe(routes, ctx.Done()); err != nil {
		return nil, fmt.Errorf("follow routes: %w", err)
	}
	changes := make(chan struct{}, 1)
	go func() {
		// The subscriptions close their channels when they end; a nil channel is never ready.
		for links != nil || addresses != nil || routes != nil {
			var open bool
			select {
			case _, open = <-links:
				if !open {
					links = nil
				}
			case _, open = <-addresses:
				if !open {
					addresses = nil
				}
			case _, open = <-routes:
				if !open {
					routes = nil
				}
			}
			if open {
				select {
				case changes <- struct{}{}:
				default:
				}
			}
		}
		close(changes)
	}()
	return changes, nil
}
