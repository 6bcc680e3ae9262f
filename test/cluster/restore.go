package cluster

import (
	"context"
	"path"

	"golang.org/x/sys/unix"
)

// Snapshot keeps the cluster's data as they are. The control plane is down meanwhile.
func (c *Cluster) Snapshot(ctx context.Context) error {
	return c.downWhile(ctx, func() error { return c.Host().Run(ctx, "cp", "-a", etcdDir, path.Join(Dir, "snapshot")) })
}

// Restore puts the data of the snapshot back, as an administrator does after a loss: resource versions go back too.
func (c *Cluster) Restore(ctx context.Context) error {
	return c.downWhile(ctx, func() error {
		if err := c.Host().Run(ctx, "rm", "-r", etcdDir); err != nil {
			return err
		}
		return c.Host().Run(ctx, "cp", "-a", path.Join(Dir, "snapshot"), etcdDir)
	})
}

func (c *Cluster) downWhile(ctx context.Context, work func() error) error {
	if err := c.KillAPIServer(ctx); err != nil {
		return err
	}
	if err := c.etcd.stop(ctx, unix.SIGTERM); err != nil {
		return err
	}
	if err := work(); err != nil {
		return err
	}
	if err := c.startEtcd(ctx); err != nil {
		return err
	}
	return c.StartAPIServer(ctx)
}
