/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef DNSBPF_REASONS_H
#define DNSBPF_REASONS_H

/*
 * Every outcome that is counted. One packet to or from an intercepted address adds one to exactly one of them.
 * Append only: the order is the layout of struct dns_counters, which user space and bpftool read.
 */
#define DNS_REASONS(X)                                                             \
	/* Queries. */                                                             \
	X(steered)             /* sent to an endpoint of the zone's group */       \
	X(passed_external)     /* a good query for a name outside every zone */    \
	X(passed_malformed)    /* cut short, or length fields that disagree */     \
	X(passed_fragment)     /* IP fragment */                                   \
	X(passed_ip_options)   /* IPv4 options or IPv6 extension headers */        \
	X(passed_response)     /* QR=1 */                                          \
	X(passed_opcode)       /* OPCODE other than QUERY */                       \
	X(passed_counts)       /* section counts that no plain query has */        \
	X(passed_label)        /* compression pointer or label type in the name */ \
	X(passed_name_length)  /* name over 255 octets */                          \
	X(passed_class)        /* QCLASS other than IN */                          \
	X(passed_edns)         /* EDNS version, or an additional record not OPT */ \
	X(passed_oversize)     /* longer than a DNS server must read (512) */      \
	X(passed_no_backend)   /* no endpoint of the packet's address family */    \
	X(passed_no_flow_slot) /* no free NAT port was drawn */                    \
	X(error_rewrite)       /* a helper refused; the packet was dropped */      \
	/* Replies of endpoints. */                                                \
	X(replied)         /* delivered to the asker */                            \
	X(reply_malformed) /* not a reply, or not readable */                      \
	X(reply_question)  /* ID matches, question does not */                     \
	X(reply_late)      /* later than flow_timeout_ns */                        \
	/* Queries again: append only. */                                          \
	X(refused_source)   /* from outside the allowed prefixes; dropped */       \
	X(refused_message)  /* can be no query: too short, or QR=1; dropped */     \
	X(steered_fallback) /* to a former server: the daemon is dead */           \
	X(answered_failure) /* SERVFAIL: no endpoint, or no free NAT port */       \
	X(answered_cached)  /* from dns_answers_* */

enum dns_reason {
#define X(name) DNS_REASON_##name,
	DNS_REASONS(X)
#undef X
		DNS_REASON_MAX,
	/* Not counted: the packet is none of ours, or parsing may go on. */
	DNS_NOT_OURS,
	DNS_OK,
};

#endif
