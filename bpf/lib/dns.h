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

#define DNS_FLAG_QR_BE	   bpf_htons(0x8000)
#define DNS_OPCODE_MASK_BE bpf_htons(0x7800)
#define DNS_CLASS_IN_BE	   bpf_htons(1)
#define DNS_TYPE_OPT_BE	   bpf_htons(41)

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

/* At most 127 labels and the root fit into DNS_NAME_MAX octets. */
#define DNS_LABELS_MAX 128
#define DNS_NAME_WORDS 32

#define ALL_BYTES(byte) (0x0101010101010101ULL * (byte))

/* In each byte's top bit: is the byte, with its own top bit clear, equal to or above limit? */
#define BYTES_NOT_BELOW(word7, limit) ((word7) + ALL_BYTES(0x80 - (limit)))

/*
 * Eight octets of a name at once: ASCII upper case becomes lower case (RFC 4343), and a dot inside a label becomes
 * 0xae, since the dotted form that zones are compared in has dots only in front of labels. Octets over 0x7f stay.
 */
static __always_inline __u64 fold_word(__u64 word)
{
	__u64 low7 = word & ALL_BYTES(0x7f);
	__u64 ascii = ~word & ALL_BYTES(0x80);
	__u64 upper = BYTES_NOT_BELOW(low7, 'A') & ~BYTES_NOT_BELOW(low7, 'Z' + 1) & ascii;
	__u64 dot = BYTES_NOT_BELOW(low7, '.') & ~BYTES_NOT_BELOW(low7, '.' + 1) & ascii;

	return (word | upper >> 2) ^ dot;
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
 * Copy what follows the DNS header to the scratch, as it is and folded. All later looks are into the scratch: map
 * memory needs no bounds check against the packet, and global functions may take it.
 */
static __always_inline void load_message(void *data, void *data_end, __u32 offset, __u32 length,
					 struct dns_scratch *scratch)
{
	void *from = data + (offset & 0x7f);
	__u32 skip = length < 8 ? 8 - length : 0;
	__u32 last = length + skip - 8;
	void *last_word;
	__u64 word;
	__u32 i;

	/*
	 * The last octets, with those before them again: one access in place of up to seven. Of a shorter message the
	 * word begins in the DNS header, whose octets are shifted out.
	 */
	barrier_var(last);
	last_word = data + ((offset - skip) & 0x7f);
	if (last <= (DNS_WIRE_WORDS - 1) * 8) {
		last_word += last;
		if (last_word + 8 <= data_end) {
			word = load_word(last_word) >> 8 * (skip & 7);
			store_word(&scratch->wire[last], word);
			store_word(&scratch->name[last], fold_word(word));
		}
	}
	for (i = 0; i < DNS_WIRE_WORDS; i++) {
		if (from + 8 > data_end)
			break;
		word = load_word(from);
		store_word(&scratch->wire[i * 8], word);
		store_word(&scratch->name[i * 8], fold_word(word));
		from += 8;
	}
}

/*
 * Walk the labels of the name in the scratch and put the dots of its dotted form in.
 *
 * Return: DNS_OK and scratch->name_length, or why the name is passed.
 */
static __always_inline enum dns_reason walk_name(struct dns_scratch *scratch, __u32 length)
{
	__u32 position = 0;
	__u32 i;

	for (i = 0; i < DNS_LABELS_MAX; i++) {
		__u32 label_length;

		if (position >= length)
			return DNS_REASON_passed_malformed;
		label_length = scratch->wire[position];
		if (label_length == 0) {
			scratch->name_length = position + 1;
			return DNS_OK;
		}
		if (label_length > DNS_LABEL_MAX)
			return DNS_REASON_passed_label;
		scratch->name[position] = '.';
		position += label_length + 1;
		if (position >= DNS_NAME_MAX)
			return DNS_REASON_passed_name_length;
	}
	return DNS_REASON_passed_name_length;
}

/*
 * parse_question - read the one question of the message in the scratch
 * @length: octets behind the DNS header
 *
 * A global function, see hash_name().
 *
 * Return: DNS_OK with scratch->name and name_length set, or why the message is passed.
 */
__noinline int parse_question(__u32 length)
{
	__u32 zero = 0;
	struct dns_scratch *scratch = bpf_map_lookup_elem(&dns_scratch, &zero);
	struct dns_question_tail *tail;
	enum dns_reason reason;
	__u32 name_length;

	if (!scratch)
		return DNS_REASON_passed_malformed;
	reason = walk_name(scratch, length);
	if (reason != DNS_OK)
		return reason;
	/* Read back: so the verifier knows one state of this value and not one for each way out of the walk. */
	name_length = *(volatile __u32 *)&scratch->name_length & 0xff;
	if (name_length + sizeof(*tail) > length)
		return DNS_REASON_passed_malformed;
	tail = (void *)&scratch->wire[name_length];
	if (tail->qclass != DNS_CLASS_IN_BE)
		return DNS_REASON_passed_class;
	return DNS_OK;
}

/* The hash that a query and its reply are compared by: QNAME without regard to case, and QTYPE. */
static __always_inline __u64 hash_question(const struct dns_scratch *scratch, __u64 seed)
{
	__u32 name_length = scratch->name_length & 0xff;
	const struct dns_question_tail *tail = (const void *)&scratch->wire[name_length];

	return hash_name(hash_word(seed, tail->qtype), 0, name_length);
}

/* What follows the question of a plain query: nothing, or one OPT record of EDNS version 0 that ends the message. */
static __always_inline enum dns_reason parse_additional(const struct dns_scratch *scratch, __u32 length, __be16 arcount,
							struct dns_pkt *pkt)
{
	__u32 offset = (scratch->name_length & 0xff) + sizeof(struct dns_question_tail);
	const struct dns_opt *opt = (const void *)&scratch->wire[offset];

	pkt->opt_size_off = 0;
	pkt->opt_size_be = 0;
	if (arcount == 0)
		return offset == length ? DNS_OK : DNS_REASON_passed_malformed;
	if (arcount != bpf_htons(1))
		return DNS_REASON_passed_counts;
	if (offset + sizeof(*opt) > length)
		return DNS_REASON_passed_malformed;
	if (opt->name != 0 || opt->type != DNS_TYPE_OPT_BE || opt->version != 0)
		return DNS_REASON_passed_edns;
	if (offset + sizeof(*opt) + bpf_ntohs(opt->rdlength) != length)
		return DNS_REASON_passed_malformed;
	pkt->opt_size_off = pkt->dns_off + sizeof(struct dnshdr) + offset + __builtin_offsetof(struct dns_opt, udp_size);
	pkt->opt_size_be = opt->udp_size;
	return DNS_OK;
}

/*
 * parse_query - is this payload a plain query, in class IN, for one name?
 *
 * Return: DNS_OK with the packet's DNS fields and the scratch set, or why it is passed. What is not fully understood
 * is passed, never dropped: the server behind answers it as the RFCs say.
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
	length -= sizeof(*hdr);
	load_message(data, data_end, pkt->dns_off + sizeof(*hdr), length, scratch);
	reason = parse_question(length);
	if (reason != DNS_OK)
		return reason;
	return parse_additional(scratch, length, hdr->arcount, pkt);
}

#endif
