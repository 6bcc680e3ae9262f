package main

import (
	"github.com/spf13/cobra"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/guardian"
)

func commands() []*cobra.Command {
	return []*cobra.Command{newAttachCommand(), newDetachCommand(), newRestoreCommand(), newStatusCommand(), newCacheCommand(), newCheckCommand(), newDoctorCommand()}
}

// asGuardian runs the guardian if this process was started as one.
func asGuardian(args []string) (is bool, err error) {
	if len(args) == 0 || args[0] != guardian.Command {
		return false, nil
	}
	return true, runGuardian(args[1:])
}
