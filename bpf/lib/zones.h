/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_ZONES_H
#define DNSBPF_ZONES_H

#include "common.h"
#include "dns.h"
#include "maps.h"
#include "types.h"

static __always_inline bool zone_name_equal(const struct dns_zone *zone, const struct dns_scratch *scratch,
					    __u32 offset, __u32 length)
{
	__u32 words = (length & 0xff) / 8;
	__u32 i;

	if (zone->length != length)
		return false;
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

/*
 * lookup_zone - is the end of the name in the scratch, from offset on, a zone?
 *
 * A global function, as is find_zone(): the verifier looks at a loop once and not once for each state of each caller.
 *
 * Return: 1 with scratch->group, backends4 and backends6 set, or 0.
 */
__noinline int lookup_zone(__u32 offset, __u32 length)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_zone *zone;
	__u64 key;

	if (!scratch)
		return 0;
	/* Seeded by the length only: user space repeats it to find the zone's key. */
	key = hash_name(length, offset, length);
	zone = bpf_map_lookup_elem(&dns_zones, &key);
	if (!zone || !zone_name_equal(zone, scratch, offset, length))
		return 0;
	scratch->group = zone->group;
	scratch->backends4 = zone->backends4;
	scratch->backends6 = zone->backends6;
	return 1;
}

/*
 * find_zone - the longest zone that the name in the scratch is in
 *
 * A name is in a zone if its dotted form ends in the zone's: the leading dot makes that a match on label boundaries.
 *
 * Return: 1 with scratch->group, backends4 and backends6 set; 0 if the name is in no zone.
 */
__noinline int find_zone(__u32 name_length)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_config *config = bpf_map_lookup_elem(&dns_config, &zero);
	__u32 i;

	if (!scratch || !config)
		return 0;
	for (i = 0; i < DNS_ZONE_LENGTHS_MAX; i++) {
		__u32 length, offset;

		if (i >= config->zone_lengths_count)
			break;
		length = config->zone_lengths[i];
		if (length > name_length)
			continue;
		offset = (name_length - length) & 0xff;
		/* The root zone is the name's last octet, and the only one without a dot. */
		if (scratch->name[offset] != '.' && length > 1)
			continue;
		if (lookup_zone(offset, length))
			return 1;
	}
	return 0;
}

#endif
