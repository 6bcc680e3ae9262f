/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_CACHE_H
#define DNSBPF_CACHE_H

#include <linux/pkt_cls.h>

#include "answer.h"
#include "common.h"
#include "config.h"
#include "csum.h"
#include "dns.h"
#include "maps.h"
#include "pkt.h"
#include "rewrite_tc.h"

/*
 * Answers from the cache. All that can fail comes first, in the scratch: a question that can't be answered is steered.
 * The packet is touched last.
 */

#define NS_PER_SECOND 1000000000ULL

/* Loads before it are done before loads after it. An atomic operation that returns something is a full fence. */
static __always_inline void read_fence(struct dns_scratch *scratch)
{
	barrier();
	if (cfg_weakly_ordered) {
		__u32 fence = __sync_fetch_and_add(&scratch->fence, 1);

		barrier_var(fence);
	}
}

/* Copy an element of the cache. Return: 0, or -1 where the daemon wrote to it meanwhile. */
static __always_inline int copy_answer(struct dns_scratch *scratch, struct dns_answer *answer, __u32 size)
{
	__u32 sequence = *(volatile __u32 *)&answer->sequence;

	if (sequence & 1)
		return -1;
	read_fence(scratch);
	/* Most are small, and loads and stores in a row cost less than a call. */
	if (size <= sizeof(struct dns_answer_small))
		__builtin_memcpy(&scratch->answer, answer, sizeof(struct dns_answer_small));
	else if (bpf_probe_read_kernel(&scratch->answer, size, answer))
		return -1;
	read_fence(scratch);
	return *(volatile __u32 *)&answer->sequence == sequence ? 0 : -1;
}

/* Is the copied answer's name the one in the scratch? */
static __always_inline bool answer_name_equal(const struct dns_scratch *scratch)
{
	__u32 length = scratch->answer.name_length;
	__u32 words = (length & 0xff) / 8;
	__u32 i;

	if (length != scratch->name_length)
		return false;
	for (i = 0; i < DNS_NAME_WORDS; i++) {
		if (i >= words)
			break;
		if (load_word(&scratch->answer_data[i * 8]) != load_word(&scratch->name[i * 8]))
			return false;
	}
	if (i == DNS_NAME_WORDS || !(length & 7))
		return true;
	return cut_word(load_word(&scratch->answer_data[i * 8]) ^ load_word(&scratch->name[i * 8]), length) == 0;
}

/* May the copied answer be given now? Sets the scratch's answer_age. */
static __always_inline bool answer_is_alive(struct dns_scratch *scratch, const struct dns_config *config)
{
	const struct dns_answer *answer = &scratch->answer;
	__u64 now = bpf_ktime_get_coarse_ns();
	/* Signed: user space's clock may be a tick ahead. */
	__s64 age = now - answer->stored_ns;

	if (age < 0)
		age = 0;
	if ((__u64)age >= answer->life_ns)
		return false;
	if (answer->vouched && (__s64)(now - config->heartbeat_ns) > (__s64)DNS_ANSWER_SILENCE_NS)
		return false;
	/* Rounded up: nobody who counts from now on keeps it beyond its end. */
	scratch->answer_age = ((__u64)age + NS_PER_SECOND - 1) / NS_PER_SECOND;
	return true;
}

/* One use of an element in 16 is counted, as 16, but for the first: else all CPUs would write to one cache line. */
static __always_inline void count_use(struct dns_scratch *scratch, __u32 number)
{
	__u32 element = number & DNS_ANSWER_LARGE ? cfg_answers_small + (number & ~DNS_ANSWER_LARGE) : number;
	__u64 *used = bpf_map_lookup_elem(&dns_answers_used, &element);

	if (!used)
		return;
	if (*used == 0)
		*used = 1;
	else if (scratch->uses++ * 0x9e3779b1U >> 28 == 0) /* in no step with questions that come by turns */
		__sync_fetch_and_add(used, 16);
}

/*
 * find_answer - the answer to the question in the scratch, for this scope
 * @asked: DNS_ASKED_*
 *
 * A global function, as is build_answer(): the verifier looks at it once. The name in the scratch must not have its
 * dots yet.
 *
 * Return: 1 with a copy in the scratch, or 0.
 */
__noinline int find_answer(__u32 scope, __u32 asked)
{
	__u32 zero = 0, number, element;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_config *config = bpf_map_lookup_elem(&dns_config, &zero);
	__u64 key;
	__u32 *found;

	if (!scratch || !config)
		return 0;
	key = hash_word(scratch->question_hash, asked);
	found = bpf_map_lookup_elem(&dns_answers_index, &key);
	if (!found)
		return 0;
	number = *found;
	element = number & ~DNS_ANSWER_LARGE;
	if (number & DNS_ANSWER_LARGE) {
		struct dns_answer_large *large = bpf_map_lookup_elem(&dns_answers_large, &element);

		if (!large || copy_answer(scratch, &large->head, sizeof(*large)))
			return 0;
	} else {
		struct dns_answer_small *small = bpf_map_lookup_elem(&dns_answers_small, &element);

		if (!small || copy_answer(scratch, &small->head, sizeof(*small)))
			return 0;
	}
	if (scratch->answer.qtype != bpf_ntohs(scratch->qtype_be) || scratch->answer.asked != asked ||
	    !(scratch->answer.scopes >> (scope & 31) & 1) || !answer_name_equal(scratch) ||
	    !answer_is_alive(scratch, config))
		return 0;
	count_use(scratch, number);
	return 1;
}

/* An Internet checksum of octets at an odd offset has its octets the other way round (RFC 1071 section 2). */
static __always_inline __u32 sum_at(__u32 offset, __u32 sum)
{
	__u32 folded = csum_fold16(sum);

	return offset & 1 ? __builtin_bswap16(folded) : folded;
}

/* The sum of an OPT record without options at an even offset. */
static __always_inline __u32 opt_sum(__be16 size_be, __u32 asked)
{
	__u32 size = bpf_ntohs(size_be);
	__u32 sum = (41 << 8 | size >> 8) + (size << 8 & 0xff00) + (asked & DNS_ASKED_DO ? 0x80 : 0);

	return __builtin_bswap16(csum_fold16(sum));
}

/* Subtract the age from each record's TTL. Return: the sum of the new ones, at their offsets in the body. */
static __always_inline __u32 age_ttls(struct dns_scratch *scratch)
{
	const struct dns_answer *answer = &scratch->answer;
	__u32 age = scratch->answer_age;
	__u64 sum = 0;
	__u32 i;

	for (i = 0; i < DNS_ANSWER_TTLS_MAX; i++) {
		__u32 at, ttl;
		__be32 *field;

		if (i >= answer->ttls_count)
			break;
		at = *(__u16 *)&scratch->answer_data[(answer->ttls_off + 2 * i) & 0x1ff];
		field = (__be32 *)&scratch->answer_data[(answer->body_off + at) & 0x7ff];
		ttl = bpf_ntohl(*field);
		ttl = ttl > age ? ttl - age : 0;
		*field = bpf_htonl(ttl);
		ttl = bpf_htonl(ttl);
		sum += sum_at(at, (ttl & 0xffff) + (ttl >> 16));
	}
	return csum_fold32(sum);
}

/* Choose which of the records that change places is first: the octets of those before it, which come last. */
static __always_inline __u32 choose_turn(const struct dns_answer *answer)
{
	return answer->run_count ? bpf_get_prandom_u32() % answer->run_count * answer->run_stride : 0;
}

static __always_inline void append_opt(struct dns_scratch *scratch, __u32 offset, __be16 size_be, __u32 asked)
{
	struct dns_opt *opt = (struct dns_opt *)&scratch->answer_data[offset & 0x7ff];

	opt->name = 0;
	opt->type = DNS_TYPE_OPT_BE;
	opt->udp_size = size_be;
	opt->extended_rcode = 0;
	opt->version = 0;
	opt->flags = asked & DNS_ASKED_DO ? DNS_FLAG_DO_BE : 0;
	opt->rdlength = 0;
}

/*
 * build_answer - make what follows the question of the found answer's reply
 * @edns: has the query an OPT record?
 * @opt_size_be: and the size in it
 * @limit: octets of the whole message
 *
 * Return: 1 with the scratch's answer, reply_length and reply_sum set.
 */
__noinline int build_answer(bool edns, __u16 opt_size_be, __u32 limit)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_answer *answer;
	__u32 question, length, sum = 0, turn = 0;

	if (!scratch)
		return 0;
	answer = &scratch->answer;
	question = sizeof(struct dnshdr) + answer->name_length + sizeof(struct dns_question_tail);
	length = answer->body_length;
	if (question + length + (edns ? sizeof(struct dns_opt) : 0) > limit) {
		length = 0;
		answer->flags_be |= DNS_FLAG_TC_BE;
		answer->counts_be[0] = 0;
		answer->counts_be[1] = 0;
		answer->counts_be[2] = 0;
	} else {
		sum = sum_at(answer->name_length, csum_fold32((__u64)answer->sum + age_ttls(scratch)));
		turn = choose_turn(answer); /* their size is even, so the sum stays */
	}
	if (edns) {
		__be16 size_be = answer->opt_size ? bpf_htons(answer->opt_size) : (__be16)opt_size_be;

		append_opt(scratch, answer->body_off + length, size_be, answer->asked);
		sum += sum_at(answer->name_length + length, opt_sum(size_be, answer->asked));
		length += sizeof(struct dns_opt);
		answer->counts_be[2] = bpf_htons(bpf_ntohs(answer->counts_be[2]) + 1);
	}
	scratch->reply_length = length;
	scratch->reply_sum = sum;
	scratch->reply_turn = turn;
	return 1;
}

/*
 * Is the query's own checksum right, or not yet one? The stack would drop a wrong one, so it is not answered.
 *
 * A packet that has not been on a wire has the sum of its pseudo header there. One that is right by chance is so, too.
 */
static __always_inline bool is_checksum_right(struct __sk_buff *skb, const struct dns_pkt *pkt,
                                              struct dns_scratch *scratch)
{
	void *data_end = (void *)(long)skb->data_end;
	struct udphdr *udp = (void *)(long)skb->data + (pkt->l4_off & 0x3f);
	__u32 length = pkt->dns_end - pkt->l4_off;
	__u64 pseudo = bpf_htons(IPPROTO_UDP) + (__u64)bpf_htons(length);
	__s64 sum;

	if ((void *)(udp + 1) > data_end)
		return false;
	if (!udp->check)
		return true;
	pseudo += (__u64)pkt->src.words[3] + pkt->dst.words[3];
	if (pkt->v6)
		pseudo += (__u64)pkt->src.words[0] + pkt->src.words[1] + pkt->src.words[2] + pkt->dst.words[0] +
		          pkt->dst.words[1] + pkt->dst.words[2];
	pseudo = csum_fold16(csum_fold32(pseudo));
	if (udp->check == pseudo || bpf_csum_level(skb, BPF_CSUM_LEVEL_QUERY) >= 0)
		return true;
	if (length > DNS_REQUEST_MAX)
		return false;
	barrier_var(length);
	length = ((length - 1) & 0x1ff) + 1;
	*(__u32 *)&scratch->request[length & 0x1fc] = 0;
	if (bpf_skb_load_bytes(skb, pkt->l4_off, scratch->request, length))
		return false;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)scratch->request, (length + 3) & 0x1fc, pseudo);
	return sum >= 0 && csum_fold16(sum) == 0xffff;
}

/* Can the reply go back to where the query came from? Not if that was sent to all: a frame has one sender. */
static __always_inline bool has_way_back(struct __sk_buff *skb)
{
	struct ethhdr *eth = (void *)(long)skb->data;

	return (void *)(eth + 1) <= (void *)(long)skb->data_end && !(eth->h_dest[0] & 1);
}

/*
 * find_reply - can this query be answered from the cache?
 *
 * A global function, too. Return: 1 with a reply in the scratch, or 0.
 */
__noinline int find_reply(struct __sk_buff *skb, struct dns_pkt *pkt, __u32 scope, bool local)
{
	__u32 limit = DNS_SIZE_MIN, mtu = 0, zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);

	if (!pkt || !scratch || !find_answer(scope, pkt->asked) || !is_checksum_right(skb, pkt, scratch) ||
	    (!local && !has_way_back(skb)))
		return 0;
	if (pkt->opt_size_off) {
		limit = bpf_ntohs(pkt->opt_size_be);
		if (limit < DNS_SIZE_MIN)
			limit = DNS_SIZE_MIN;
		if (limit > cfg_edns_size_max)
			limit = cfg_edns_size_max;
	}
	/* What is larger than the way back would vanish there. */
	if (limit > DNS_SIZE_MIN && !local && !bpf_check_mtu(skb, 0, &mtu, 0, 0)) {
		mtu -= pkt->dns_off - ETH_HLEN;
		if (limit > mtu)
			limit = mtu;
	}
	return build_answer(pkt->opt_size_off, pkt->opt_size_be, limit);
}

/* What the query's checksum changes by, but for its pseudo header. */
static __always_inline __u32 diff_reply(const struct dns_scratch *scratch, const struct dns_pkt *pkt,
                                        const struct dnshdr *hdr, __be16 old_length, __be16 new_length)
{
	const struct dns_answer *answer = &scratch->answer;
	__u32 diff = csum_diff16(old_length, new_length, 0);

	diff = csum_diff16(hdr->flags, answer->flags_be, diff);
	diff = csum_diff16(hdr->ancount, answer->counts_be[0], diff);
	diff = csum_diff16(hdr->nscount, answer->counts_be[1], diff);
	diff = csum_diff16(hdr->arcount, answer->counts_be[2], diff);
	if (pkt->opt_size_off)
		diff = csum_diff16(sum_at(answer->name_length, opt_sum(pkt->opt_size_be, answer->asked)), 0, diff);
	return csum_fold32((__u64)diff + scratch->reply_sum);
}

/* The IP header's new length. What swap_ends() did changes no sum. */
static __always_inline int write_length(void *data, void *data_end, const struct dns_pkt *pkt, __u32 dns_end)
{
	if (pkt->v6) {
		struct ipv6hdr *ip6 = data + ETH_HLEN;

		if ((void *)(ip6 + 1) > data_end)
			return -1;
		ip6->payload_len = bpf_htons(dns_end - pkt->l4_off);
	} else {
		struct iphdr *ip = data + ETH_HLEN;
		__be16 length = bpf_htons(dns_end - ETH_HLEN);

		if ((void *)(ip + 1) > data_end)
			return -1;
		ip->check = csum_apply(ip->check, csum_diff16(ip->tot_len, length, 0));
		ip->tot_len = length;
	}
	return 0;
}

/* To where it came from, which need not be where a route to its sender leads. */
static __always_inline int swap_macs(void *data, void *data_end)
{
	struct ethhdr *eth = data;
	__u8 mac[ETH_ALEN];

	if ((void *)(eth + 1) > data_end)
		return -1;
	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
	return 0;
}

/* Write so many octets of the scratch's data into the packet. Return: 0, or an error. */
static __always_inline int store_data(struct __sk_buff *skb, __u32 to, const struct dns_scratch *scratch, __u32 from,
                                      __u32 length)
{
	if (!length)
		return 0;
	barrier_var(length);
	length = ((length - 1) & 0x7ff) + 1;
	return bpf_skb_store_bytes(skb, to, &scratch->answer_data[from & 0x7ff], length, 0);
}

/* Write all that is behind the question, and then the records that change places in their turn. */
static __always_inline int store_reply(struct __sk_buff *skb, __u32 to, const struct dns_scratch *scratch)
{
	const struct dns_answer *answer = &scratch->answer;
	__u32 turn = scratch->reply_turn;
	__u32 run = answer->body_off + answer->run_off;
	__u32 behind = answer->run_count * answer->run_stride - turn;

	if (store_data(skb, to, scratch, answer->body_off, scratch->reply_length))
		return -1;
	if (!turn)
		return 0;
	to += answer->run_off;
	return store_data(skb, to, scratch, run + turn, behind) || store_data(skb, to + behind, scratch, run, turn);
}

/* Put the reply that is in the scratch in the query's place. Return: 0, or -1: the packet may be half-written. */
static __always_inline int write_reply(struct __sk_buff *skb, const struct dns_pkt *pkt, struct dns_scratch *scratch,
                                       bool local)
{
	__u32 question_end =
		pkt->dns_off + sizeof(struct dnshdr) + scratch->answer.name_length + sizeof(struct dns_question_tail);
	__u32 csum_off = (pkt->l4_off & 0x3f) + __builtin_offsetof(struct udphdr, check);
	__u32 dns_end = question_end + scratch->reply_length;
	__be16 old_length = bpf_htons(pkt->dns_end - pkt->l4_off);
	__be16 new_length = bpf_htons(dns_end - pkt->l4_off);
	void *data, *data_end;
	struct udphdr *udp;
	struct dnshdr *hdr;
	__u32 diff;

	if (bpf_skb_change_tail(skb, dns_end, 0) || store_reply(skb, question_end, scratch))
		return -1;
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	hdr = data + (pkt->dns_off & 0x7f);
	if ((void *)(hdr + 1) > data_end)
		return -1;
	diff = diff_reply(scratch, pkt, hdr, old_length, new_length);
	if (bpf_l4_csum_replace(skb, csum_off, 0, csum_diff16(old_length, new_length, 0),
	                        L4_CSUM_FLAGS | BPF_F_PSEUDO_HDR) ||
	    bpf_l4_csum_replace(skb, csum_off, 0, diff, L4_CSUM_FLAGS))
		return -1;
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	udp = data + (pkt->l4_off & 0x3f);
	hdr = data + (pkt->dns_off & 0x7f);
	if ((void *)(udp + 1) > data_end || (void *)(hdr + 1) > data_end || swap_ends(data, data_end, pkt) ||
	    write_length(data, data_end, pkt, dns_end) || (!local && swap_macs(data, data_end)))
		return -1;
	/* As in rewrite_tc(). */
	if (!udp->check)
		bpf_csum_update(skb, diff);
	udp->len = new_length;
	hdr->flags = scratch->answer.flags_be;
	hdr->ancount = scratch->answer.counts_be[0];
	hdr->nscount = scratch->answer.counts_be[1];
	hdr->arcount = scratch->answer.counts_be[2];
	return 0;
}

/*
 * answer_cached - make a query the reply that find_reply() left in the scratch
 * @local: see answer_failure()
 *
 * Invalidates all packet pointers. Return: a TC verdict, with *reason set. No other program gets the packet.
 */
static __always_inline int answer_cached(struct __sk_buff *skb, const struct dns_pkt *pkt, struct dns_scratch *scratch,
                                         bool local, enum dns_reason *reason)
{
	if (forget_sender(skb) || write_reply(skb, pkt, scratch, local)) {
		*reason = DNS_REASON_error_rewrite;
		return TC_ACT_SHOT;
	}
	return local ? TC_ACT_OK : bpf_redirect(skb->ifindex, 0);
}

/*
 * Was this question asked lately? Then a reply may be worth keeping.
 *
 * Two questions may share an element: then only the one that is asked twice in a row counts.
 */
static __always_inline bool is_asked_again(const struct dns_scratch *scratch)
{
	__u32 element = scratch->question_hash & (DNS_SEEN - 1);
	__u32 *seen = bpf_map_lookup_elem(&dns_seen, &element);
	__u32 tag = scratch->question_hash >> 32;

	if (!seen)
		return false;
	if (*seen == tag)
		return true;
	*seen = tag;
	return false;
}

/*
 * Tell the daemon of a reply that was found good. It is delivered in any case. Must come before the packet changes.
 * @asked, @generation: of its flow
 */
static __always_inline void offer_reply(struct __sk_buff *skb, const struct dns_pkt *pkt, struct dns_scratch *scratch,
                                        __u32 asked, __u32 generation)
{
	__u32 length = pkt->dns_end - pkt->dns_off;

	if (asked & DNS_ASKED_ODD || length > DNS_MESSAGE_MAX || !is_asked_again(scratch))
		return;
	scratch->offer.replied_ns = bpf_ktime_get_coarse_ns();
	scratch->offer.generation = generation;
	scratch->offer.asked = asked;
	scratch->offer.length = length;
	barrier_var(length);
	length = ((length - 1) & 0x7ff) + 1;
	if (bpf_skb_load_bytes(skb, pkt->dns_off, scratch->offer_message, length))
		return;
	/* No wake-up: one costs more than the whole query. */
	if (bpf_ringbuf_output(&dns_offers, &scratch->offer, sizeof(scratch->offer) + length, BPF_RB_NO_WAKEUP))
		scratch->offers_lost++;
}

#endif
