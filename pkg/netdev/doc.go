// Package netdev answers questions about interfaces, routes and ports of the current network namespace, follows their
// changes, and attaches filters on kernels without TCX links. It is the only user of netlink.
package netdev
