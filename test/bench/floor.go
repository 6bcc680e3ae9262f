package main

import (
	"context"
	"fmt"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// The compiler and its options are those of the product's programs.
//
//go:generate go tool -modfile=../../go.mod bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -tags linux floor bpf/floor.bpf.c -- -O2 -g -Wall -Wextra -Werror -Wshadow -std=gnu11 -nostdinc -mcpu=v3 -I../../headers

// floor attaches the program that answers without a look where a vantage's queries come in.
func (b *bench) floor(from *vantage) preparation {
	return func(context.Context) (undo func() error, err error) {
		var objects floorObjects
		if err := loadFloorObjects(&objects, nil); err != nil {
			return nil, err
		}
		defer objects.Close() // the link keeps the program
		options := link.TCXOptions{Program: objects.FloorPort, Attach: ebpf.AttachTCXIngress}
		if from.port == "lo" {
			options.Program, options.Attach = objects.FloorLo, ebpf.AttachTCXEgress
		}
		var attached link.Link
		err = b.lab.Host().Do(func() error {
			port, err := net.InterfaceByName(from.port)
			if err != nil {
				return err
			}
			options.Interface = port.Index
			attached, err = link.AttachTCX(options)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("attach the floor to %s: %w: it needs TCX, which Linux has from 6.6", from.port, err)
		}
		return attached.Close, nil
	}
}
