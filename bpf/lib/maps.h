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
 * The cache of answers. Written by the daemon, the elements through shared memory. Not pinned: other programs than
 * those of the daemon that vouches for the answers must not give them.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DNS_ANSWERS_SMALL_MAX + DNS_ANSWERS_LARGE_MAX);
	__type(key, __u64);   /* of question_hash and DNS_ASKED_* */
	__type(value, __u32); /* an element's number */
} dns_answers_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DNS_ANSWERS_SMALL_MAX);
	__type(key, __u32);
	__type(value, struct dns_answer_small);
	__uint(map_flags, BPF_F_MMAPABLE);
} dns_answers_small SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DNS_ANSWERS_LARGE_MAX);
	__type(key, __u32);
	__type(value, struct dns_answer_large);
	__uint(map_flags, BPF_F_MMAPABLE);
} dns_answers_large SEC(".maps");

/* How often each element was used, the small ones first: exact for the first time only. Set to 0 by the daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DNS_ANSWERS_SMALL_MAX + DNS_ANSWERS_LARGE_MAX);
	__type(key, __u32);
	__type(value, __u64);
	__uint(map_flags, BPF_F_MMAPABLE);
} dns_answers_used SEC(".maps");

/* Which questions have been asked lately: a flood of names that nobody asks twice is not offered. */
#define DNS_SEEN 65536 /* elements, a power of two */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DNS_SEEN);
	__type(key, __u32);
	__type(value, __u32);
} dns_seen SEC(".maps");

/* Replies that may become answers. Read by the daemon; what does not fit is lost. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* octets */
} dns_offers SEC(".maps");

#define DNS_MESSAGE_MAX 1232 /* octets of a reply that is offered or answered */
#define DNS_REQUEST_MAX 292  /* of a query that is answered, with its UDP header: the longest name and an OPT record */

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

	__u64 offers_lost; /* by offer_reply() */

	__u64 draws; /* how often a NAT port was drawn for, of all packets */

	/* Then by find_answer(), a copy that nobody writes to, and by build_answer(), of what is behind the question.
	 */
	struct dns_answer answer;
	__u8 answer_data[4096 +
	                 64]; /* with room for what the verifier can't rule out: a place, and as much from there */
	__u32 fence;          /* see read_fence() */
	__u32 uses;           /* see count_use() */
	__u32 answer_age;     /* seconds, rounded up */
	__u32 reply_length;   /* octets behind the question, at answer.body_off */
	__u32 reply_sum;      /* of them */
	__u32 reply_turn;     /* octets of the records that change places and are not first */

	/* Apart: no query is looked at while its reply is. */
	struct dns_offer offer;
	__u8 offer_message[2048];
	__u8 request[512]; /* a query's UDP datagram, of which the checksum is taken */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dns_scratch);
} dns_scratch SEC(".maps");

#endif
