/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_MAPS_H
#define DNSBPF_MAPS_H

#include "common.h"
#include "types.h"

/* Settings that change while attached. Written by the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dns_config);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_config SEC(".maps");

/* Intercepted (address, port) -> scope. Written by the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, struct dns_listener_key);
	__type(value, struct dns_listener);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_listeners SEC(".maps");

/* Zone -> group of endpoints. Written by the daemon; one element is replaced as a whole. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, struct dns_zone);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_zones SEC(".maps");

/*
 * (group, index) -> endpoint. Written by the daemon. A group is never changed: a new one is written under a new
 * number, the zones are switched to it, then the old one goes. A reader sees the old group or the new one.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct dns_backend_key);
	__type(value, struct dns_backend);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_backends SEC(".maps");

/* Prefixes that queries come from, and where from. Of two that an address is in, the longer one counts. Written by the
 * daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 4096);
	__type(key, struct dns_prefix);
	__type(value, struct dns_source);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_sources SEC(".maps");

/*
 * Interface on which queries enter -> interface through which their replies leave, where that is another one: a
 * bridge's port has no route of its own, the bridge has. Written by the daemon.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_reply_via SEC(".maps");

/*
 * Steered queries in flight, by NAT port. Written by the kernel programs. An array and not an LRU hash: a slot is found
 * without a hash, claimed without a lock, and never taken from a query that still waits; a lost reply's slot is free
 * again after flow_timeout_ns.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DNS_NAT_PORTS_MAX);
	__type(key, __u32);
	__type(value, struct dns_flow);
	__uint(map_flags, BPF_F_MMAPABLE); /* the daemon looks through all of it several times a second */
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_flows SEC(".maps");

/*
 * Whose turn it is, by client and question: a query that is asked again goes to the next endpoint. Two questions may
 * share an element and then take turns together; a lost update makes an endpoint have two turns. Not pinned: worth
 * nothing later.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DNS_TURNS);
	__type(key, __u32);
	__type(value, __u32);
} dns_turns SEC(".maps");

/* Scope -> counters. Written by the kernel programs. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DNS_SCOPE_MAX);
	__type(key, __u32); /* enum dns_scope: the kernel keeps BTF of an array only with a plain key */
	__type(value, struct dns_counters);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} dns_stats SEC(".maps");

/*
 * The question under examination: too large for the stack. A program is not interrupted by another of ours on its CPU,
 * since all of them run with bottom halves off.
 */
struct dns_scratch {
	/* First, of a query that comes by a wire, by admit(): is the source right, and allowed? */
	__u32 may_ask;

	/* Then by parse_question(). */
	__u32 labels;      /* without the root */
	__u32 name_length; /* octets with the root label */
	__u32 qtype_be;
	__u8 starts[DNS_LABELS_MAX]; /* where each label starts, the root's too */

	/* Then by load_question(). */
	__u8 name[256 + 16]; /* with room for a word-wise writer's overrun; find_zone() gives it dots */
	__u64 question_hash;

	/* Then by find_zone() or find_fallback(). */
	__u32 group;
	__u16 backends4;
	__u16 backends6;

	__u64 draws; /* how often a NAT port was drawn for, of all packets */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dns_scratch);
} dns_scratch SEC(".maps");

#endif
