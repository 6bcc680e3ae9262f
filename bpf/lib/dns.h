/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_DNS_H
#define DNSBPF_DNS_H

#include "common.h"
#include "maps.h"
#include "pkt.h"
#include "reasons.h"
#include "types.h"

/* RFC 1035 section 4.1.1 */
struct dnshdr {
	__be16 id;
	__be16 flags;
	__be16 qdcount;
	__be16 ancount;
	__be16 nscount;
	__be16 arcount;
};

#define DNS_FLAG_QR_BE     bpf_htons(0x8000)
#define DNS_OPCODE_MASK_BE bpf_htons(0x7800)
#define DNS_FLAG_RD_BE     bpf_htons(0x0100)
#define DNS_FLAG_RA_BE     bpf_htons(0x0080)
#define DNS_FLAG_TC_BE     bpf_htons(0x0200)
#define DNS_FLAG_CD_BE     bpf_htons(0x0010)
#define DNS_FLAG_DO_BE     bpf_htons(0x8000) /* of an OPT record */
#define DNS_SERVFAIL_BE    bpf_htons(2)
#define DNS_CLASS_IN_BE    bpf_htons(1)
#define DNS_TYPE_OPT_BE    bpf_htons(41)
#define DNS_SIZE_MIN       512 /* octets of a message that everybody takes (RFC 1035 section 2.3.4) */
#define DNS_EDNS_PADDING   12  /* RFC 7830 */

/* Behind the name of a question. */
struct dns_question_tail {
	__be16 qtype;
	__be16 qclass;
};

/* An OPT record (RFC 6891 section 6.1.2), its root name included. */
struct dns_opt {
	__u8 name;
	__be16 type;
	__be16 udp_size;
	__u8 extended_rcode;
	__u8 version;
	__be16 flags;
	__be16 rdlength;
} __attribute__((packed));

#define DNS_NAME_WORDS 32 /* of 8 octets hold a name */

#define ALL_BYTES(byte) (0x0101010101010101ULL * (byte))

/* In each byte's top bit: is the byte, with its own top bit clear, equal to or above limit? */
#define BYTES_NOT_BELOW(word7, limit) ((word7) + ALL_BYTES(0x80 - (limit)))

/*
 * Eight octets of a name at once: ASCII upper case becomes lower case (RFC 4343). Octets over 0x7f stay, and so do the
 * length octets of labels, which are below 'A'.
 */
static __always_inline __u64 fold_word(__u64 word)
{
	__u64 low7 = word & ALL_BYTES(0x7f);
	__u64 ascii = ~word & ALL_BYTES(0x80);
	__u64 upper = BYTES_NOT_BELOW(low7, 'A') & ~BYTES_NOT_BELOW(low7, 'Z' + 1) & ascii;

	return word | upper >> 2;
}

/* One step of the hash over a name's words; user space repeats it in Go, so it may not depend on the machine. */
static __always_inline __u64 hash_word(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 32;
}

/* Through a parameter, since clang would split an access that it sees to be unaligned into one per octet. */
static __always_inline __u64 load_word(const void *from)
{
	return *(const __u64 *)from;
}

static __always_inline void store_word(void *to, __u64 word)
{
	*(__u64 *)to = word;
}

/* A word of which only the first octets count. Little-endian, as the object is. */
static __always_inline __u64 cut_word(__u64 word, __u32 octets)
{
	return word & ((1ULL << 8 * (octets & 7)) - 1);
}

/*
 * hash_name - hash a part of the name in the scratch
 * @hash: what to start from
 *
 * A global function: the verifier looks at its loop once, and not once for each state of each caller.
 */
__noinline __u64 hash_name(__u64 hash, __u32 offset, __u32 length)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	__u32 words = (length & 0xff) / 8;
	__u32 i;

	if (!scratch)
		return 0;
	for (i = 0; i < DNS_NAME_WORDS; i++) {
		if (i >= words)
			break;
		hash = hash_word(hash, load_word(&scratch->name[offset & 0xff]));
		offset += 8;
	}
	if (length & 7)
		hash = hash_word(hash, cut_word(load_word(&scratch->name[offset & 0xff]), length));
	return hash;
}

/*
 * Walk the labels of a question's name and note where each starts.
 *
 * Return: DNS_OK with scratch->starts, labels and name_length set, or why the message is passed.
 */
static __always_inline enum dns_reason walk_name(void *data, void *data_end, __u32 offset, __u32 length,
                                                 struct dns_scratch *scratch)
{
	void *name = data + (offset & 0x7f);
	__u32 position = 0;
	__u32 i;

	for (i = 0; i < DNS_LABELS_MAX; i++) {
		__u8 *label = name + position;
		__u32 label_length;

		if ((void *)(label + 1) > data_end || position >= length)
			return DNS_REASON_passed_malformed;
		label_length = *label;
		scratch->starts[i] = position;
		if (label_length == 0) {
			scratch->labels = i;
			scratch->name_length = position + 1;
			return DNS_OK;
		}
		if (label_length > DNS_LABEL_MAX)
			return DNS_REASON_passed_label;
		position += label_length + 1;
		if (position >= DNS_NAME_MAX)
			return DNS_REASON_passed_name_length;
	}
	return DNS_REASON_passed_name_length;
}

/*
 * parse_question - read the one question of a message
 *
 * Return: DNS_OK with the walk's results and scratch->qtype_be set, or why the message is passed.
 */
static __always_inline enum dns_reason parse_question(void *data, void *data_end, __u32 offset, __u32 length,
                                                      struct dns_scratch *scratch)
{
	struct dns_question_tail *tail;
	enum dns_reason reason;
	__u32 name_length;

	reason = walk_name(data, data_end, offset, length, scratch);
	if (reason != DNS_OK)
		return reason;
	/* Read back: so the verifier knows one state of this value and not one for each way out of the walk. */
	name_length = *(volatile __u32 *)&scratch->name_length & 0xff;
	if (name_length + sizeof(*tail) > length)
		return DNS_REASON_passed_malformed;
	tail = data + (offset & 0x7f) + name_length;
	if ((void *)(tail + 1) > data_end)
		return DNS_REASON_passed_malformed;
	if (tail->qclass != DNS_CLASS_IN_BE)
		return DNS_REASON_passed_class;
	scratch->qtype_be = tail->qtype;
	return DNS_OK;
}

/*
 * Copy the name that parse_question() found to the scratch, folded. What follows it there is arbitrary.
 * @offset: of the name in the frame. A DNS header precedes it, and QTYPE and QCLASS follow.
 */
static __always_inline void load_name(void *data, void *data_end, __u32 offset, struct dns_scratch *scratch)
{
	__u32 length = (scratch->name_length & 0xff) + sizeof(struct dns_question_tail);
	__u32 skip = length < 8 ? 8 - length : 0;
	__u32 last = length + skip - 8;
	void *from = data + (offset & 0x7f);
	void *last_word = data + ((offset - skip) & 0x7f);
	__u32 i;

	/*
	 * The last octets, with those before them again: one access in place of up to seven. Of a shorter question the
	 * word begins in the DNS header, whose octets are shifted out.
	 */
	barrier_var(last);
	if (last <= DNS_NAME_MAX) {
		last_word += last;
		if (last_word + 8 <= data_end)
			store_word(&scratch->name[last], fold_word(load_word(last_word) >> 8 * (skip & 7)));
	}
	for (i = 0; i < DNS_NAME_WORDS; i++) {
		if (i * 8 >= length || from + 8 > data_end)
			break;
		store_word(&scratch->name[i * 8], fold_word(load_word(from)));
		from += 8;
	}
}

/*
 * load_question - have the question that parse_question() found ready in the scratch: the name, and the hash that a
 * query and its reply are compared by, of QNAME without regard to case and QTYPE
 * @offset: see load_name()
 *
 * The hash is of the name's wire form: find_zone(), later, gives the name its dots. A global function, so that the
 * verifier looks at its loop once. Return: always 0.
 */
__noinline int load_question(struct __sk_buff *skb, __u32 offset)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_config *config = bpf_map_lookup_elem(&dns_config, &zero);

	if (!scratch || !config)
		return 0;
	load_name((void *)(long)skb->data, (void *)(long)skb->data_end, offset, scratch);
	scratch->question_hash =
		hash_name(hash_word(config->question_seed, scratch->qtype_be), 0, scratch->name_length);
	return 0;
}

/* What follows the question of a plain query: nothing, or one OPT record of EDNS version 0 that ends the message. */
static __always_inline enum dns_reason parse_additional(void *data, void *data_end, __be16 arcount,
                                                        const struct dns_scratch *scratch, struct dns_pkt *pkt)
{
	__u32 offset =
		pkt->dns_off + sizeof(struct dnshdr) + (scratch->name_length & 0xff) + sizeof(struct dns_question_tail);
	struct dns_opt *opt = data + (offset & 0x1ff);

	pkt->opt_size_off = 0;
	pkt->opt_size_be = 0;
	if (arcount == 0)
		return offset == pkt->dns_end ? DNS_OK : DNS_REASON_passed_malformed;
	if (arcount != bpf_htons(1))
		return DNS_REASON_passed_counts;
	if ((void *)(opt + 1) > data_end || offset + sizeof(*opt) > pkt->dns_end)
		return DNS_REASON_passed_malformed;
	if (opt->name != 0 || opt->type != DNS_TYPE_OPT_BE || opt->version != 0)
		return DNS_REASON_passed_edns;
	if (offset + sizeof(*opt) + bpf_ntohs(opt->rdlength) != pkt->dns_end)
		return DNS_REASON_passed_malformed;
	pkt->opt_size_off = offset + __builtin_offsetof(struct dns_opt, udp_size);
	pkt->opt_size_be = opt->udp_size;
	if (opt->flags & DNS_FLAG_DO_BE)
		pkt->asked |= DNS_ASKED_DO;
	if (opt->flags & ~DNS_FLAG_DO_BE || opt->extended_rcode || opt->rdlength)
		pkt->asked |= DNS_ASKED_ODD;
	return DNS_OK;
}

/* What a query's header asks for: RD, AD and CD. Any other bit is for a server to judge. */
static __always_inline __u16 asked_bits(__u16 flags)
{
	__u16 asked = (flags >> 8 & DNS_ASKED_RD) | (flags >> 4 & DNS_ASKED_AD) | (flags >> 2 & DNS_ASKED_CD);

	return flags & ~0x0130 ? asked | DNS_ASKED_ODD : asked;
}

/*
 * parse_query - is this payload a plain query, in class IN, for one name?
 *
 * Return: DNS_OK with the packet's DNS fields and the scratch's question set, or why it is passed. What is not fully
 * understood is passed, never dropped: the server behind answers it as the RFCs say.
 */
static __always_inline enum dns_reason parse_query(void *data, void *data_end, __u16 size_max, struct dns_pkt *pkt,
                                                   struct dns_scratch *scratch)
{
	struct dnshdr *hdr = data + (pkt->dns_off & 0x7f);
	__u32 length = pkt->dns_end - pkt->dns_off;
	enum dns_reason reason;

	if ((void *)(hdr + 1) > data_end || length < sizeof(*hdr))
		return DNS_REASON_passed_malformed;
	if (hdr->flags & DNS_FLAG_QR_BE)
		return DNS_REASON_passed_response;
	if (hdr->flags & DNS_OPCODE_MASK_BE)
		return DNS_REASON_passed_opcode;
	if (hdr->qdcount != bpf_htons(1) || hdr->ancount || hdr->nscount)
		return DNS_REASON_passed_counts;
	if (length > size_max)
		return DNS_REASON_passed_oversize;
	pkt->id = bpf_ntohs(hdr->id);
	pkt->asked = asked_bits(bpf_ntohs(hdr->flags));
	reason = parse_question(data, data_end, pkt->dns_off + sizeof(*hdr), length - sizeof(*hdr), scratch);
	if (reason != DNS_OK)
		return reason;
	return parse_additional(data, data_end, hdr->arcount, scratch, pkt);
}

#endif
