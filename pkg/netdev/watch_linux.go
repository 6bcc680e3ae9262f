package netdev

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// resubscribe is how often a subscription that can't be renewed is tried again.
const resubscribe = time.Second

// Changes sends a value after interfaces, addresses, routes or IPsec policies have changed, until ctx ends. Changes that come while
// one is waiting to be received are the same value: the receiver looks at the state anew in any case.
func Changes(ctx context.Context) (<-chan struct{}, error) {
	current, err := subscribe()
	if err != nil {
		return nil, err
	}
	changes := make(chan struct{}, 1)
	changed := func() {
		select {
		case changes <- struct{}{}:
		default:
		}
	}
	go func() {
		defer close(changes)
		for {
			current.forward(ctx, changed)
			// The kernel ends a subscription whose reader was too slow for a flood of events: some are lost, and there may be
			// no other after them.
			for {
				if ctx.Err() != nil {
					return
				}
				if current, err = subscribe(); err == nil {
					break
				}
				select {
				case <-ctx.Done():
				case <-time.After(resubscribe):
				}
			}
			changed()
		}
	}()
	return changes, nil
}

// subscription to all events that matter. The channels are closed when it has ended.
type subscription struct {
	links     chan netlink.LinkUpdate
	addresses chan netlink.AddrUpdate
	routes    chan netlink.RouteUpdate
	policies  chan struct{} // of IPsec
	done      chan struct{}
}

func subscribe() (*subscription, error) {
	s := &subscription{
		links: make(chan netlink.LinkUpdate), addresses: make(chan netlink.AddrUpdate), routes: make(chan netlink.RouteUpdate),
		policies: make(chan struct{}), done: make(chan struct{}),
	}
	if err := netlink.LinkSubscribe(s.links, s.done); err != nil {
		return nil, fmt.Errorf("follow interfaces: %w", err)
	}
	if err := netlink.AddrSubscribe(s.addresses, s.done); err != nil {
		close(s.done)
		return nil, fmt.Errorf("follow addresses: %w", err)
	}
	if err := netlink.RouteSubscribe(s.routes, s.done); err != nil {
		close(s.done)
		return nil, fmt.Errorf("follow routes: %w", err)
	}
	if err := s.followPolicies(); err != nil {
		close(s.done)
		return nil, fmt.Errorf("follow IPsec policies: %w", err)
	}
	return s, nil
}

// followPolicies subscribes to changes of IPsec policies, if the kernel has any and this process may know.
func (s *subscription) followPolicies() error {
	socket, err := nl.Subscribe(unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EPERM) {
		s.policies = nil
		return nil
	}
	if err != nil {
		return err
	}
	go func() {
		<-s.done
		socket.Close()
	}()
	go func() {
		defer close(s.policies)
		for {
			if _, _, err := socket.Receive(); err != nil {
				return
			}
			s.policies <- struct{}{}
		}
	}()
	return nil
}

// forward calls changed after each event, until ctx or one of the subscriptions ends; then it ends the others.
func (s *subscription) forward(ctx context.Context, changed func()) {
	stop := ctx.Done()
	end := func() {
		if stop != nil {
			stop = nil
			close(s.done)
		}
	}
	// A nil channel is never ready. All of them are read until they are closed: their writers must not be left waiting.
	for s.links != nil || s.addresses != nil || s.routes != nil || s.policies != nil {
		var open bool
		select {
		case <-stop:
			end()
			continue
		case _, open = <-s.links:
			if !open {
				s.links = nil
			}
		case _, open = <-s.addresses:
			if !open {
				s.addresses = nil
			}
		case _, open = <-s.routes:
			if !open {
				s.routes = nil
			}
		case _, open = <-s.policies:
			if !open {
				s.policies = nil
			}
		}
		if open {
			changed()
		} else {
			end()
		}
	}
}
