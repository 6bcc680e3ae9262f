// Package datapath owns everything in the kernel: it loads, attaches and pins the BPF programs, and gives each map a
// typed wrapper. It is the only user of cilium/ebpf.
//
// What is pinned outlives the process: queries are steered while the daemon is stopped, restarted or dead, until
// [Remove] is called. The layout below the pin directory is
//
//	maps/dns_stats        each map, by its name in the object
//	links/dns_from_host-lo-egress    each attachment, by program, interface and hook
package datapath
