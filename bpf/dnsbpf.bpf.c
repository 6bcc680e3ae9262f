//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The programs of k2s-dnsbpf, one per attach point. Each obtains the packet, parses, decides, applies and counts once;
 * only here a reason becomes a verdict. What is not ours goes to the next program on the hook, untouched.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include "lib/answer.h"
#include "lib/cache.h"
#include "lib/common.h"
#include "lib/config.h"
#include "lib/dns.h"
#include "lib/filter.h"
#include "lib/maps.h"
#include "lib/metrics.h"
#include "lib/pkt.h"
#include "lib/rewrite_tc.h"
#include "lib/steer.h"
#include "lib/types.h"
#include "lib/zones.h"

/* bpf_redirect_neigh() and others are for GPL-compatible programs; the source is under either licence. */
char __license[] SEC("license") = "Dual BSD/GPL";

/* The next program on the hook, then the stack: TC_ACT_UNSPEC, which tcx calls TCX_NEXT. */
#define PASS TC_ACT_UNSPEC

/* A packet that is more than one datagram, or of a VLAN. A tag of VLAN 0 has but a priority, and the stack ignores it.
 */
static __always_inline bool is_odd_skb(const struct __sk_buff *skb)
{
	return skb->gso_size || (skb->vlan_present && skb->vlan_tci & VLAN_VID_MASK);
}

/*
 * Make a frame's headers accessible, as far as it has them. A driver may leave all of it but the Ethernet header
 * outside of the linear part. Where that fails the parser finds none. Invalidates all packet pointers.
 */
static __always_inline void pull_headers(struct __sk_buff *skb)
{
	__u64 linear = (void *)(long)skb->data_end - (void *)(long)skb->data;
	__u32 length = skb->len;

	if (likely(linear >= HEADERS_MAX || linear >= length))
		return;
	bpf_skb_pull_data(skb, length < HEADERS_MAX ? length : HEADERS_MAX);
}

/* Make a packet's payload accessible. Invalidates all packet pointers. */
static __always_inline int pull(struct __sk_buff *skb, __u32 length)
{
	if ((void *)(long)skb->data + length <= (void *)(long)skb->data_end)
		return 0;
	return bpf_skb_pull_data(skb, length);
}

/* Has another server the port there? It gets all that is not steered, but for names in a zone: it asks outside for
 * them. */
static __always_inline bool is_others(enum dns_scope scope)
{
	return scope == DNS_SCOPE_TRANSPARENT || scope == DNS_SCOPE_SHARED;
}

/*
 * Where a query is asked, and what it is judged by: set by find_query(). Apart from the packet, of which functions of
 * their own are given the address: so these stay in registers, and are no part of the verifier's states.
 */
struct dns_query {
	struct dns_scratch *scratch;
	const struct dns_config *config;
	const struct dns_listener *
		listener; /* its scope is read anew each time: a value in a register would be part of the states, too */
	bool local;       /* it leaves through lo: a program of this host asks */
};

/*
 * Return: DNS_OK or a passed_* reason, as parse_udp(), for a packet to one of our listeners; DNS_NOT_OURS for any
 * other.
 */
static __always_inline enum dns_reason find_query(struct __sk_buff *skb, struct dns_pkt *pkt, struct dns_query *query)
{
	struct dns_listener_key key = { .port = cfg_dns_port };
	void *data, *data_end;
	enum dns_reason reason;
	__u32 zero = 0;

	pull_headers(skb);
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	reason = parse_udp(data, data_end, skb->len, pkt);
	if (likely(reason == DNS_NOT_OURS || (pkt->has_ports && pkt->dport != cfg_dns_port)))
		return DNS_NOT_OURS;
	if (load_addrs(data, data_end, pkt))
		return DNS_NOT_OURS;
	__builtin_memcpy(&key.addr, &pkt->dst, sizeof(key.addr));
	query->listener = bpf_map_lookup_elem(&dns_listeners, &key);
	query->scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	query->config = bpf_map_lookup_elem(&dns_config, &zero);
	if (!query->listener || !query->scratch || !query->config)
		return DNS_NOT_OURS;
	return reason;
}

/*
 * May this client ask there? Whoever asks by a wire has to be where its source address says.
 *
 * Return: DNS_OK, refused_source, or DNS_NOT_OURS for what the stack and the server behind it are to judge.
 */
static __always_inline enum dns_reason admit(const struct __sk_buff *skb, const struct dns_pkt *pkt,
                                             const struct dns_query *query)
{
	struct dns_scratch *scratch = query->scratch;

	if (query->local)
		return DNS_OK;
	/* The host's own resolver is for its programs: what comes by a wire only claims to be of one. */
	if (query->listener->scope == DNS_SCOPE_HOST || query->listener->scope == DNS_SCOPE_TRANSPARENT)
		return DNS_NOT_OURS;
	scratch->may_ask = may_ask(&pkt->src, skb->ifindex, query->listener->scope != DNS_SCOPE_POD);
	if (!scratch->may_ask && query->listener->scope == DNS_SCOPE_POD)
		return DNS_NOT_OURS;
	/*
	 * Here too: the ingress filter may be missing, or on another interface than a pod's query for this address
	 * comes in on. A packet whose port can't be read may be for another service.
	 */
	if (!scratch->may_ask && query->listener->scope == DNS_SCOPE_KUBESWITCH && pkt->has_ports)
		return DNS_REASON_refused_source;
	return DNS_OK;
}

/* Does another server have the port there, that answers whom we do not? */
static __always_inline bool is_refused_later(const struct dns_query *query)
{
	return !query->local && query->listener->scope == DNS_SCOPE_SHARED && !query->scratch->may_ask;
}

/*
 * Return: answered_cached with a reply in the scratch, a steered* reason with the scratch's group set, or why the query
 * is passed. Invalidates all packet pointers.
 */
static __always_inline enum dns_reason read_query(struct __sk_buff *skb, struct dns_pkt *pkt, struct dns_query *query)
{
	bool cached = query->config->answers;
	void *data, *data_end;
	enum dns_reason reason;

	if (is_odd_skb(skb) || pull(skb, pkt->dns_end))
		return DNS_REASON_passed_malformed;
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	reason = parse_query(data, data_end, cfg_query_size_max, pkt, query->scratch);
	if (reason != DNS_OK)
		return reason;
	if (cached && !(pkt->asked & DNS_ASKED_ODD) && !is_refused_later(query)) {
		load_question(skb, pkt->dns_off + sizeof(struct dnshdr));
		if (find_reply(skb, pkt, query->listener->scope, query->local))
			return DNS_REASON_answered_cached;
	} else {
		cached = false;
	}
	return route_query(skb, pkt, query->scratch, query->config, query->listener->scope, cached);
}

/* Send a query to an endpoint of its group. Return: a TC verdict; *reason changes where that is not what happens. */
static __always_inline int steer_query(struct __sk_buff *skb, const struct dns_pkt *pkt, const struct dns_query *query,
                                       enum dns_reason *reason)
{
	struct dns_rewrite to = {};
	enum dns_reason failure;

	if (*reason == DNS_REASON_steered && is_refused_later(query)) {
		*reason = DNS_REASON_refused_source;
		return TC_ACT_SHOT;
	}
	failure = decide_query(pkt, query->scratch, query->config, query->listener->scope, skb->ifindex, query->local,
	                       &to);
	if (failure == DNS_OK)
		return apply_tc(skb, pkt, &to, reason);
	if (is_others(query->listener->scope))
		return answer_failure(skb, pkt, query->local, reason);
	*reason = failure;
	return PASS;
}

static __always_inline int handle_query(struct __sk_buff *skb, bool local)
{
	struct dns_query query = { .local = local };
	struct dns_pkt pkt = {};
	enum dns_reason reason, admitted;
	int verdict = PASS;

	reason = find_query(skb, &pkt, &query);
	if (reason == DNS_NOT_OURS)
		return PASS;
	admitted = admit(skb, &pkt, &query);
	if (admitted == DNS_NOT_OURS)
		return PASS;
	if (admitted != DNS_OK) {
		count(query.listener->scope, admitted);
		return TC_ACT_SHOT;
	}
	if (reason == DNS_OK)
		reason = read_query(skb, &pkt, &query);
	if (reason == DNS_REASON_steered || reason == DNS_REASON_steered_fallback)
		verdict = steer_query(skb, &pkt, &query, &reason);
	else if (reason == DNS_REASON_answered_cached)
		verdict = answer_cached(skb, &pkt, query.scratch, local, &reason);
	count(query.listener->scope, reason);
	return verdict;
}

/* Programs of this host ask an address of this host: their packets leave through lo. */
SEC("tc")
int dns_from_host(struct __sk_buff *skb)
{
	return handle_query(skb, true);
}

/* Other hosts ask an address of this host: on the ingress of the interface that they are behind. */
SEC("tc")
int dns_from_client(struct __sk_buff *skb)
{
	return handle_query(skb, false);
}

/*
 * The ingress filter of an interface that other hosts ask on. It refuses and never steers: a bridge is no XDP redirect
 * target, and a TC redirect resolves neighbours by itself.
 */
SEC("xdp")
int dns_filter(struct xdp_md *xdp)
{
	struct dns_listener_key listener_key = { .port = cfg_dns_port };
	void *data = (void *)(long)xdp->data;
	void *data_end = (void *)(long)xdp->data_end;
	struct dns_listener *listener;
	struct dns_pkt pkt = {};
	enum dns_reason reason;

	data += priority_tag(data, data_end);
	reason = parse_udp(data, data_end, data_end - data, &pkt);
	/* A packet whose port can't be read may be for another service here: user space checks its source. */
	if (reason == DNS_NOT_OURS ? !is_dns_tcp(data, data_end, &pkt) : !pkt.has_ports || pkt.dport != cfg_dns_port)
		return XDP_PASS;
	if (load_addrs(data, data_end, &pkt))
		return XDP_PASS;
	__builtin_memcpy(&listener_key.addr, &pkt.dst, sizeof(listener_key.addr));
	listener = bpf_map_lookup_elem(&dns_listeners, &listener_key);
	/* Other intercepted addresses, the cluster's DNS address above all, are open to whom this host routes for. */
	if (!listener || listener->scope != DNS_SCOPE_KUBESWITCH)
		return XDP_PASS;

	if (!may_ask(&pkt.src, xdp->ingress_ifindex, true))
		reason = DNS_REASON_refused_source;
	else if (reason == DNS_OK && !can_be_query(data, data_end, &pkt))
		reason = DNS_REASON_refused_message;
	else
		return XDP_PASS;
	count(listener->scope, reason);
	return XDP_DROP;
}

/* Endpoints reply: on the ingress of each interface that leads to one. */
SEC("tc")
int dns_from_backend(struct __sk_buff *skb)
{
	struct dns_scratch *scratch;
	struct dns_config *config;
	struct dns_rewrite to = {};
	void *data, *data_end;
	enum dns_reason reason;
	enum dns_scope scope;
	struct dns_pkt pkt = {};
	__u32 asked, generation;
	int verdict = PASS;
	__u32 zero = 0;

	pull_headers(skb);
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	if (parse_udp(data, data_end, skb->len, &pkt) != DNS_OK)
		return PASS;
	config = bpf_map_lookup_elem(&dns_config, &zero);
	if (!config || (__u16)(pkt.dport - config->nat_port_min) >= config->nat_port_count)
		return PASS;
	scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	if (!scratch || load_addrs(data, data_end, &pkt) || is_odd_skb(skb) || pull(skb, pkt.dns_end))
		return PASS;

	reason = decide_reply(skb, &pkt, scratch, config, &scope, &asked, &generation, &to);
	if (reason == DNS_NOT_OURS)
		return PASS;
	if (reason == DNS_REASON_replied) {
		if (config->answers)
			offer_reply(skb, &pkt, scratch, asked, generation);
		verdict = apply_tc(skb, &pkt, &to, &reason);
	}
	count(scope, reason);
	return verdict;
}
