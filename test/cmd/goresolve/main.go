// Command goresolve looks names up with Go's own resolver, which reads /etc/resolv.conf itself: the way in which most
// programs of a cluster resolve. It prints one answer a line, sorted.
//
//	goresolve a|aaaa|srv|ptr|txt|cname NAME...
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: goresolve a|aaaa|srv|ptr|txt|cname NAME...")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, name := range os.Args[2:] {
		answers, err := lookUp(ctx, os.Args[1], name)
		if err != nil {
			fmt.Fprintln(os.Stderr, "goresolve:", err)
			os.Exit(1)
		}
		slices.Sort(answers)
		for _, a := range answers {
			fmt.Println(a)
		}
	}
}

func lookUp(ctx context.Context, kind, name string) ([]string, error) {
	resolver := &net.Resolver{PreferGo: true}
	switch kind {
	case "a", "aaaa":
		network := map[string]string{"a": "ip4", "aaaa": "ip6"}[kind]
		addrs, err := resolver.LookupNetIP(ctx, network, name)
		return texts(addrs, netip.Addr.String), err
	case "srv":
		_, records, err := resolver.LookupSRV(ctx, "", "", name)
		return texts(records, func(s *net.SRV) string {
			return fmt.Sprintf("%d %d %d %s", s.Priority, s.Weight, s.Port, s.Target)
		}), err
	case "ptr":
		return resolver.LookupAddr(ctx, name)
	case "txt":
		return resolver.LookupTXT(ctx, name)
	case "cname":
		target, err := resolver.LookupCNAME(ctx, name)
		return []string{target}, err
	}
	return nil, errors.New("unknown record type " + kind)
}

func texts[T any](values []T, text func(T) string) []string {
	var out []string
	for _, v := range values {
		out = append(out, text(v))
	}
	return out
}
