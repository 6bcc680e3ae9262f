/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_CSUM_H
#define DNSBPF_CSUM_H

#include "common.h"

/*
 * Differences of Internet checksums (RFC 1071, RFC 1624): the ones' complement sum of what was taken out, inverted, and
 * of what was put in. Independent of byte order, as all of RFC 1071 is.
 */

static __always_inline __u32 csum_fold32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* Return: the sum of 16 bits, not inverted. */
static __always_inline __u32 csum_fold16(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

static __always_inline __u32 csum_diff(const __be32 *from, const __be32 *to, __u32 words, __u32 seed)
{
	__u64 sum = seed;
	__u32 i;

	for (i = 0; i < words; i++)
		sum += (__u64)(__u32)~from[i] + to[i];
	return csum_fold32(sum);
}

static __always_inline __u32 csum_diff16(__be16 from, __be16 to, __u32 seed)
{
	return csum_fold32((__u64)seed + (__u16)~from + to);
}

/* The same for a field at an odd offset, whose octets count in the other half of a sum of 16-bit words. */
static __always_inline __u32 csum_diff16_at(__u32 offset, __be16 from, __be16 to, __u32 seed)
{
	if (offset & 1)
		return csum_diff16(__builtin_bswap16(from), __builtin_bswap16(to), seed);
	return csum_diff16(from, to, seed);
}

/* A header's checksum field after a difference. */
static __always_inline __u16 csum_apply(__u16 check, __u32 diff)
{
	__u32 sum = (__u16)~check;

	sum += (diff & 0xffff) + (diff >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

#endif
