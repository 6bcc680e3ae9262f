/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_TYPES_H
#define DNSBPF_TYPES_H

#include "common.h"
#include "reasons.h"

/*
 * Everything in this file is shared with user space: bpf2go makes the Go types from it, and bpftool prints it by name.
 * Addresses are 16 bytes in network order, IPv4 as v4-mapped; ports and IDs are numbers, in the machine's byte order,
 * so that a dump shows 53 and not 13568. No implicit holes.
 */

#define DNS_NAME_MAX        255 /* RFC 1035 section 3.1, octets of the wire form with the root label */
#define DNS_LABEL_MAX       63  /* RFC 1035 section 2.3.4 */
#define DNS_LABELS_MAX      128 /* that fit into DNS_NAME_MAX octets, the root included */
#define DNS_ZONE_SHAPES_MAX 32  /* distinct shapes of zone names */

/* Reading the precise clock costs as much as matching a name: one query in 16 pays it. */
#define DNS_LATENCY_SAMPLE 16

/* Bucket i counts replies within 2^i microseconds; the last one all that are slower. */
#define DNS_LATENCY_BUCKETS 24

/* Where a query entered: what the counters are kept by. */
enum dns_scope {
	DNS_SCOPE_HOST,
	DNS_SCOPE_KUBESWITCH,
	DNS_SCOPE_POD,
	DNS_SCOPE_TRANSPARENT, /* another server has the port, and queries of this host's programs are steered past it
	                        */
	DNS_SCOPE_SHARED,      /* the same at the KubeSwitch address: those of workers, too */
	DNS_SCOPE_MAX,
};

/* What a name must have to be in a zone: the last labels of this number take this many octets, with the root label. */
struct dns_zone_shape {
	__u8 length;
	__u8 labels;
};

/* dns_config[0] */
struct dns_config {
	__u64 flow_timeout_ns;    /* a later reply is no longer delivered */
	__u64 question_seed;      /* random, secret: keys the hash that a reply's question is compared by */
	__u64 draw_key[2];        /* random, secret, of this load: NAT ports are drawn with it */
	__u64 heartbeat_ns;       /* CLOCK_MONOTONIC_COARSE of the daemon's last sign of life */
	__u64 heartbeat_limit_ns; /* a daemon silent for longer is dead; 0: it is never taken for dead */
	__u16 nat_port_min;       /* NAT ports are drawn from [min, min + count) */
	__u16 nat_port_count;     /* at most DNS_NAT_PORTS_MAX */
	__u16 answers;            /* 1: queries are answered from dns_answers_*, and replies offered in dns_offers */
	__u16 zone_shapes_count;
	struct dns_zone_shape zone_shapes[DNS_ZONE_SHAPES_MAX]; /* of dns_zones, without repetition, longest first */
	__u32 generation; /* of what the daemon knows of the cluster: a query's reply is offered with the one of its
	                     start */
	__u32 reserved;
};
_Static_assert(sizeof(struct dns_config) == 128, "layout is shared with user space");

struct dns_listener_key {
	__u8 addr[16];
	__u16 port;
	__u16 reserved;
};
_Static_assert(sizeof(struct dns_listener_key) == 20, "layout is shared with user space");

struct dns_listener {
	enum dns_scope scope;
};
_Static_assert(sizeof(struct dns_listener) == 4, "layout is shared with user space");

/*
 * The key of dns_zones is hash_name() of the name's wire form, seeded by its length. The name itself is compared, in
 * its dotted form: the hash is never trusted alone.
 */
#define DNS_ZONE_FALLBACK 1 /* the root zone only: steered while the daemon is dead, to the host's former servers */

struct dns_zone {
	__u32 group;     /* of dns_backends */
	__u16 backends4; /* IPv4 endpoints in the group: indexes 0 .. backends4-1 */
	__u16 backends6; /* IPv6 endpoints: indexes DNS_BACKEND_V6 .. DNS_BACKEND_V6+backends6-1 */
	__u32 length;    /* octets of the name, the final NUL (the root label) included */
	__u16 labels;    /* without the root */
	__u16 flags;     /* DNS_ZONE_* */
	char name[256];  /* lower-case, a dot before each label: ".cluster.local"; NUL-padded */
};
_Static_assert(sizeof(struct dns_zone) == 272, "layout is shared with user space");

#define DNS_BACKEND_V6 0x8000

/* Where a query comes from: key of the trie dns_sources. IPv4 as v4-mapped, so its prefixes are 96 longer. */
struct dns_prefix {
	__u32 length;
	__u8 addr[16];
};
_Static_assert(sizeof(struct dns_prefix) == 20, "layout is shared with user space");

#define DNS_ANY_INTERFACE 0xffffffff

struct dns_source {
	__u32 ifindex; /* interface that its packets come in on, or DNS_ANY_INTERFACE; 0: none, nobody else may have it
	                */
	__u32 allowed; /* 1: may ask at the KubeSwitch address */
};
_Static_assert(sizeof(struct dns_source) == 8, "layout is shared with user space");

struct dns_backend_key {
	__u32 group;
	__u32 index;
};
_Static_assert(sizeof(struct dns_backend_key) == 8, "layout is shared with user space");

struct dns_backend {
	__u8 addr[16];
	__u8 nat_addr[16]; /* source address towards the endpoint: this host's, on out_ifindex */
	__u32 out_ifindex;
	__u16 port;
	__u16 reserved;
};
_Static_assert(sizeof(struct dns_backend) == 40, "layout is shared with user space");

#define DNS_TURNS 4096 /* elements of dns_turns, a power of two */

/* NAT ports of dns_config, at the most: each has a slot in dns_flows. More would no longer fit a core's cache. */
#define DNS_NAT_PORTS_MAX 16384

/* A slot of dns_flows, for one steered query in flight. */
struct dns_flow {
	__u64 started_ns;    /* CLOCK_MONOTONIC_COARSE, 0: free. Claimed and given back by compare-and-swap */
	__u64 timed_ns;      /* CLOCK_MONOTONIC, 0: this query's latency is not sampled */
	__u64 question_hash; /* seeded hash of QNAME (case folded) and QTYPE */
	__u8 endpoint[16];
	__u8 client[16];
	__u8 listener[16]; /* the address that the client asked, and that the reply must come from */
	__u16 endpoint_port;
	__u16 client_port;
	__u16 listener_port;
	__u16 id;
	__u32 ifindex; /* interface on which the query entered */
	enum dns_scope scope;
	__u32 local;       /* 1: entered on lo, the reply is delivered to lo's ingress */
	__u32 out_ifindex; /* interface that it left through, and that the reply must come in on */
	__u32 generation;  /* of dns_config when it was steered */
	__u32 asked;       /* DNS_ASKED_* */
};
_Static_assert(sizeof(struct dns_flow) == 104, "layout is shared with user space");

/*
 * The bits of a query that change its answer besides the question: part of the key of dns_answers_index. An odd one has
 * others, or EDNS options, which a server judges.
 */
#define DNS_ASKED_RD  1
#define DNS_ASKED_AD  2
#define DNS_ASKED_CD  4
#define DNS_ASKED_DO  8
#define DNS_ASKED_ODD 0x80

/* A value of dns_answers_index: an element of dns_answers_large with this bit, else of dns_answers_small. */
#define DNS_ANSWER_LARGE 0x80000000

#define DNS_ANSWERS_SMALL_MAX 16384
#define DNS_ANSWERS_LARGE_MAX 2048

/* Octets of an element's data. In a large one fit: the longest name, so many offsets, and the body of a message. */
#define DNS_ANSWER_SMALL_DATA 288
#define DNS_ANSWER_LARGE_DATA 1536
#define DNS_ANSWER_TTLS_MAX   64

/* For cluster names nobody else forgets, so a daemon that was silent for so long makes an answer worthless. */
#define DNS_ANSWER_SILENCE_NS 5000000000ULL

/*
 * What a question is answered with. An element's data has, one behind the other, the name in lower case and in wire
 * form, a __u16 for each record, which is the offset of its TTL in the body, and the body: all that follows the
 * question of the reply, without an OPT record.
 *
 * The daemon writes it through shared memory while programs read: with an odd sequence, or one that has changed
 * meanwhile, what was read is worthless.
 */
struct dns_answer {
	__u32 sequence;
	__u32 scopes;    /* 1 << enum dns_scope: where it may be given */
	__u64 stored_ns; /* CLOCK_MONOTONIC_COARSE: when its source gave it */
	__u64 life_ns;   /* and for how long it may be given then */
	__u32 sum;       /* Internet checksum of the body with all TTLs zero, not inverted, as if at an even offset */
	__u16 qtype;
	__u16 asked;     /* DNS_ASKED_* */
	__be16 flags_be; /* of the header, with RCODE */
	__be16 counts_be[3];
	__u16 name_length; /* with the root label; without padding */
	__u16 ttls_off;
	__u16 ttls_count;
	__u16 body_off;
	__u16 body_length;
	__u16 run_off; /* in the body: records that change places */
	__u16 run_count;
	__u16 run_stride;
	__u16 opt_size; /* the server's UDP payload size, 0: as the asker's */
	__u16 vouched;  /* 1: worthless without a living daemon */
	__u32 reserved;
};
_Static_assert(sizeof(struct dns_answer) == 64, "layout is shared with user space");

struct dns_answer_small {
	struct dns_answer head;
	__u8 data[DNS_ANSWER_SMALL_DATA];
};

struct dns_answer_large {
	struct dns_answer head;
	__u8 data[DNS_ANSWER_LARGE_DATA];
};

/* A record of dns_offers: a reply that was delivered, the message behind it. */
struct dns_offer {
	__u64 replied_ns; /* CLOCK_MONOTONIC_COARSE */
	__u32 generation;
	__u16 asked;
	__u16 length; /* octets of the message */
};
_Static_assert(sizeof(struct dns_offer) == 16, "layout is shared with user space");

/* dns_stats[scope], per CPU. */
struct dns_counters {
#define X(name) __u64 name;
	DNS_REASONS(X)
#undef X
	__u64 latency_us_log2[DNS_LATENCY_BUCKETS]; /* of one query in DNS_LATENCY_SAMPLE */
};
_Static_assert(sizeof(struct dns_counters) == 8 * (DNS_REASON_MAX + DNS_LATENCY_BUCKETS),
               "a reason is an index into the counters");

#endif
