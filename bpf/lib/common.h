/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_COMMON_H
#define DNSBPF_COMMON_H

#include <linux/types.h>
#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* libbpf's header uses NULL without defining it: the object is built without a C library. */
#ifndef NULL
#define NULL ((void *)0)
#endif

typedef _Bool bool;
#define true  1
#define false 0

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* An IPv4 address inside an IPv6 one (RFC 4291 section 2.5.5.2), so that every map holds one address format. */
#define V4MAPPED_PREFIX_BE bpf_htonl(0x0000ffff)

union addr {
	__u8 bytes[16];
	__be32 words[4];
	__u64 halves[2];
};

static __always_inline void addr_set_v4(union addr *addr, __be32 v4)
{
	addr->halves[0] = 0;
	addr->words[2] = V4MAPPED_PREFIX_BE;
	addr->words[3] = v4;
}

#endif
