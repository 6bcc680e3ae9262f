/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_METRICS_H
#define DNSBPF_METRICS_H

#include "common.h"
#include "maps.h"
#include "reasons.h"
#include "types.h"

/* Called once for each packet of ours, by the entry points only. */
static __always_inline void count(enum dns_scope scope, enum dns_reason reason)
{
	__u32 key = scope;
	struct dns_counters *counters = bpf_map_lookup_elem(&dns_stats, &key);
	__u32 index = reason;

	/* One register for test and use: else the compiler may test one copy and use another. */
	barrier_var(index);
	if (counters && index < DNS_REASON_MAX)
		((__u64 *)counters)[index]++;
}

/* The time from the query to its accepted reply. */
static __always_inline void count_latency(enum dns_scope scope, __u64 nanoseconds)
{
	__u32 key = scope;
	struct dns_counters *counters = bpf_map_lookup_elem(&dns_stats, &key);
	__u64 microseconds = nanoseconds / 1000;
	__u32 bucket = 0;
	__u32 bits;

	if (!counters)
		return;
	/* The number of bits, by halving: BPF has no instruction for it. */
	for (bits = 32; bits; bits /= 2) {
		if (microseconds >> bits) {
			microseconds >>= bits;
			bucket += bits;
		}
	}
	bucket += microseconds; /* now 0 or 1 */
	if (bucket >= DNS_LATENCY_BUCKETS)
		bucket = DNS_LATENCY_BUCKETS - 1;
	counters->latency_us_log2[bucket]++;
}

#endif
