/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The floor under every DNS server of this machine: a program that turns a query over IPv4 into a reply without looking
 * at it. It swaps addresses and ports, sets QR, and nothing more. What is faster answers nothing; what comes close to
 * it can't be made much faster.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define DNS_PORT_BE bpf_htons(53)
#define QR_BE       bpf_htons(0x8000)

struct query {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__be16 id;
	__be16 flags;
} __attribute__((packed));

#define CHECKSUM_OFFSET (__builtin_offsetof(struct query, udp) + __builtin_offsetof(struct udphdr, check))

static __always_inline _Bool reflect(struct __sk_buff *skb)
{
	struct query *q = (void *)(long)skb->data;
	unsigned char mac[ETH_ALEN];
	__be16 port, flags;
	__be32 addr;

	if ((void *)(q + 1) > (void *)(long)skb->data_end)
		return 0;
	if (q->eth.h_proto != bpf_htons(ETH_P_IP) || q->ip.version != 4 || q->ip.ihl != 5 ||
	    q->ip.protocol != IPPROTO_UDP || q->udp.dest != DNS_PORT_BE || (q->flags & QR_BE))
		return 0;
	__builtin_memcpy(mac, q->eth.h_dest, ETH_ALEN);
	__builtin_memcpy(q->eth.h_dest, q->eth.h_source, ETH_ALEN);
	__builtin_memcpy(q->eth.h_source, mac, ETH_ALEN);
	addr = q->ip.daddr;
	q->ip.daddr = q->ip.saddr;
	q->ip.saddr = addr;
	port = q->udp.dest;
	q->udp.dest = q->udp.source;
	q->udp.source = port;
	flags = q->flags;
	q->flags = flags | QR_BE;
	/* The swaps leave the sum as it was. One that a device would have to complete is left to it. */
	bpf_l4_csum_replace(skb, CHECKSUM_OFFSET, flags, flags | QR_BE, sizeof(flags) | BPF_F_MARK_MANGLED_0);
	return 1;
}

/* For lo's egress: the packet goes on to where it came from. */
SEC("tc")
int floor_lo(struct __sk_buff *skb)
{
	reflect(skb);
	return TC_ACT_OK;
}

/* For the ingress of an interface that leads to the client. */
SEC("tc")
int floor_port(struct __sk_buff *skb)
{
	return reflect(skb) ? bpf_redirect(skb->ifindex, 0) : TC_ACT_OK;
}

char _license[] SEC("license") = "Dual BSD/GPL";
