//go:build linux

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/client"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

func newCacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Show what is answered from the kernel",
		Long: "Show what is answered from the kernel: how many answers there are, how often they are used, and why others are not kept.\n" +
			"Exit status 3: nothing is answered from the kernel.",
		Args: noArgs,
	}
	reporting(cmd, newSettings(cmd), func(ctx context.Context, c config.Config) (report, bool, error) {
		r, err := client.Cache(ctx, c)
		return r, r.On, err
	})
	cmd.AddCommand(newCacheListCommand(), newCacheFlushCommand())
	return cmd
}

// suffixOf is the name that a command is for, "" for all.
func suffixOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

func newCacheListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls [SUFFIX]",
		Short: "List the answers of a name and of all below it, those that are used most first",
		Args:  cobra.MaximumNArgs(1),
	}
	var suffix string
	reporting(cmd, newSettings(cmd), func(ctx context.Context, c config.Config) (report, bool, error) {
		list, err := client.Answers(ctx, c, suffix)
		return list, true, err
	})
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		suffix = suffixOf(args)
		return run(cmd, args)
	}
	return cmd
}

func newCacheFlushCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "flush [SUFFIX]",
		Short: "Forget the answers of a name and of all below it, or all of them",
		Args:  cobra.MaximumNArgs(1),
	}
	s := newSettings(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := s.config(cmd.Context())
		if err != nil {
			return err
		}
		dropped, err := client.Flush(cmd.Context(), c, suffixOf(args))
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "forgot %d answers\n", dropped)
		return err
	}
	return cmd
}
