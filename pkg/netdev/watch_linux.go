package netdev

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// resubscribe is how often a subscription that can't be renewed is tried again.
const resubscribe = time.Second

// Changes sends a value after interfaces, addresses, routes or IPsec policies have changed, or filters were removed, until ctx ends. Changes that come while
// one is waiting to be received are merged: the receiver reads the whole state anyway.
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
	filters   chan struct{} // of traffic control, removed
	done      chan struct{}
}

func subscribe() (*subscription, error) {
	s := &subscription{
		links: make(chan netlink.LinkUpdate), addresses: make(chan netlink.AddrUpdate), routes: make(chan netlink.RouteUpdate),
		policies: make(chan struct{}), filters: make(chan struct{}), done: make(chan struct{}),
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
	// A kernel may have no IPsec, and this process may not know of it.
	err := s.follow(s.policies, unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EPERM) {
		s.policies, err = nil, nil
	}
	if err != nil {
		close(s.done)
		return nil, fmt.Errorf("follow IPsec policies: %w", err)
	}
	if err := s.follow(s.filters, unix.NETLINK_ROUTE, unix.RTNLGRP_TC, unix.RTM_DELTFILTER, unix.RTM_DELQDISC); err != nil {
		close(s.done)
		return nil, fmt.Errorf("follow filters: %w", err)
	}
	return s, nil
}

// follow sends to events for each message of a group that is of one of the types, or of any if none is given.
func (s *subscription) follow(events chan<- struct{}, protocol int, group uint, types ...uint16) error {
	socket, err := nl.Subscribe(protocol, group)
	if err != nil {
		return err
	}
	go func() {
		<-s.done
		socket.Close()
	}()
	go func() {
		defer close(events)
		for {
			messages, _, err := socket.Receive()
			if err != nil {
				return
			}
			if len(types) == 0 || slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool { return slices.Contains(types, m.Header.Type) }) {
				events <- struct{}{}
			}
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
	for s.links != nil || s.addresses != nil || s.routes != nil || s.policies != nil || s.filters != nil {
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
		case _, open = <-s.filters:
			if !open {
				s.filters = nil
			}
		}
		if open {
			changed()
		} else {
			end()
		}
	}
}
