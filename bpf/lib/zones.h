/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_ZONES_H
#define DNSBPF_ZONES_H

#include "common.h"
#include "dns.h"
#include "maps.h"
#include "types.h"

/* Could the last labels of the name be a zone of this shape? */
static __always_inline bool has_shape(const struct dns_scratch *scratch, const struct dns_zone_shape *shape)
{
	return shape->labels <= scratch->labels &&
	       scratch->name_length - scratch->starts[(scratch->labels - shape->labels) & (DNS_LABELS_MAX - 1)] ==
	               shape->length;
}

/* The cheap test that tells almost all other names from those in a zone, before the name itself is looked at. */
static __always_inline bool may_be_in_zone(const struct dns_scratch *scratch, const struct dns_config *config)
{
	__u32 i;

	for (i = 0; i < DNS_ZONE_SHAPES_MAX; i++) {
		if (i >= config->zone_shapes_count)
			return false;
		if (has_shape(scratch, &config->zone_shapes[i]))
			return true;
	}
	return false;
}

/*
 * Is the end of the name, from offset on, this zone? The zone has a dot where the name has a label's length octet. With
 * as many dots as labels, and every label's start at a dot, the labels are the same: a dot inside of a label finds none
 * left.
 */
static __always_inline bool zone_name_equal(const struct dns_zone *zone, const struct dns_scratch *scratch,
                                            __u32 offset, __u32 length)
{
	__u32 words = (length & 0xff) / 8;
	__u32 i;

	for (i = 0; i < DNS_NAME_WORDS; i++) {
		if (i >= words)
			break;
		if (load_word(&zone->name[i * 8]) != load_word(&scratch->name[offset & 0xff]))
			return false;
		offset += 8;
	}
	if (i == DNS_NAME_WORDS || !(length & 7))
		return true;
	return load_word(&zone->name[i * 8]) == cut_word(load_word(&scratch->name[offset & 0xff]), length);
}

/* Put the name into its dotted form, for good. Return: always 0, as a global function must return something. */
__noinline int dot_name(void)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	__u32 i;

	if (!scratch)
		return 0;
	for (i = 0; i < DNS_LABELS_MAX; i++) {
		if (i >= scratch->labels)
			break;
		scratch->name[scratch->starts[i]] = '.';
	}
	return 0;
}

/*
 * lookup_zone - is the end of the name in the scratch, from offset on, this zone?
 * @key: of dns_zones
 * @fallback: is a zone meant that is steered only while the daemon is dead?
 *
 * A global function, as is find_zone(): the verifier looks at a loop once and not once for each state of each caller.
 *
 * Return: 1 with scratch->group, backends4 and backends6 set; 0 if there is no such key; -1 if it is another name's.
 */
__noinline int lookup_zone(__u64 key, __u32 offset, __u32 length, bool fallback)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_zone *zone = bpf_map_lookup_elem(&dns_zones, &key);

	if (!scratch || !zone)
		return 0;
	dot_name();
	if (zone->length != length || !zone_name_equal(zone, scratch, offset, length))
		return -1;
	if (zone->flags & DNS_ZONE_FALLBACK && !fallback)
		return 0;
	scratch->group = zone->group;
	scratch->backends4 = zone->backends4;
	scratch->backends6 = zone->backends6;
	return 1;
}

/*
 * find_zone - the longest zone that the name in the scratch is in
 *
 * A name that shares its hash with a zone, which can be had on purpose only, ends the search: user space matches it.
 *
 * Return: 1 with scratch->group, backends4 and backends6 set; 0 if the name is in no zone.
 */
__noinline int find_zone(void)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_config *config = bpf_map_lookup_elem(&dns_config, &zero);
	__u32 i;

	if (!scratch || !config)
		return 0;
	for (i = 0; i < DNS_ZONE_SHAPES_MAX; i++) {
		__u32 length, offset;
		int found;

		if (i >= config->zone_shapes_count)
			break;
		if (!has_shape(scratch, &config->zone_shapes[i]))
			continue;
		length = config->zone_shapes[i].length;
		offset = scratch->name_length - length;
		found = lookup_zone(hash_name(length, offset, length), offset, length, false);
		if (found)
			return found > 0;
	}
	return 0;
}

/*
 * Would a query that is passed be lost, since the daemon has been silent for too long and its forwarder is dead?
 * In the other scopes a server was asked that lives without it: CoreDNS behind its Service, or the one that the
 * host names. Signed: the sign of life may come between the two reads, after a tick of the clock.
 */
static __always_inline bool needs_fallback(const struct dns_config *config, enum dns_scope scope)
{
	return (scope == DNS_SCOPE_HOST || scope == DNS_SCOPE_KUBESWITCH) && config->heartbeat_limit_ns &&
	       (__s64)(bpf_ktime_get_coarse_ns() - config->heartbeat_ns) > (__s64)config->heartbeat_limit_ns;
}

/*
 * find_fallback - the root zone, if the daemon left one for its death
 *
 * Return: 1 with scratch->group, backends4 and backends6 set, or 0.
 */
static __always_inline bool find_fallback(const struct dns_scratch *scratch)
{
	__u32 offset = scratch->name_length - 1;

	return lookup_zone(hash_name(1, offset, 1), offset, 1, true) > 0;
}

#endif
