/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_CONFIG_H
#define DNSBPF_CONFIG_H

#include "common.h"
#include "types.h"

/*
 * Settings that hold for the life of a load. They become constants before verification, so a switch costs nothing.
 * What changes while programs are attached is in the map dns_config.
 */

/* The port that clients ask. Listeners on other ports are not looked up. */
const volatile __u16 cfg_dns_port = 53;

/* A steered query's EDNS UDP payload size is lowered to this, so that no reply is fragmented (DNS flag day 2020). */
const volatile __u16 cfg_edns_size_max = 1232;

/* Queries longer than this are passed: a server need not read more from UDP (RFC 1035 section 2.3.4). */
const volatile __u16 cfg_query_size_max = 512;

/* Elements of dns_answers_small. */
const volatile __u32 cfg_answers_small = DNS_ANSWERS_SMALL_MAX;

/* Does another CPU see stores in another order than they were made in (all but x86)? Then a fence is needed. */
const volatile bool cfg_weakly_ordered = true;

#endif
