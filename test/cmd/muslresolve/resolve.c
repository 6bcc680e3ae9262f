// Looks names up with the C library it is linked with: musl, whose resolver asks all name servers at once, uses
// TCP only since 1.2.4 and knows neither nsswitch.conf nor single-request. Prints one answer a line.
//
//	muslresolve a|aaaa|ptr|srv|txt NAME...
#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <netdb.h>
#include <resolv.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

static int addresses(int family, const char *name)
{
	struct addrinfo hints = { .ai_family = family, .ai_socktype = SOCK_DGRAM }, *list, *a;
	char text[INET6_ADDRSTRLEN];
	int err = getaddrinfo(name, NULL, &hints, &list);

	if (err) {
		fprintf(stderr, "muslresolve: %s: %s\n", name, gai_strerror(err));
		return 1;
	}
	for (a = list; a; a = a->ai_next) {
		const void *addr = family == AF_INET ? (const void *)&((struct sockaddr_in *)a->ai_addr)->sin_addr
		                                     : (const void *)&((struct sockaddr_in6 *)a->ai_addr)->sin6_addr;

		puts(inet_ntop(family, addr, text, sizeof(text)));
	}
	freeaddrinfo(list);
	return 0;
}

static int host_name(const char *address)
{
	struct sockaddr_in in4 = { .sin_family = AF_INET };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6 };
	char host[NI_MAXHOST];
	int err;

	if (inet_pton(AF_INET, address, &in4.sin_addr) == 1) {
		err = getnameinfo((struct sockaddr *)&in4, sizeof(in4), host, sizeof(host), NULL, 0, NI_NAMEREQD);
	} else if (inet_pton(AF_INET6, address, &in6.sin6_addr) == 1) {
		err = getnameinfo((struct sockaddr *)&in6, sizeof(in6), host, sizeof(host), NULL, 0, NI_NAMEREQD);
	} else {
		fprintf(stderr, "muslresolve: %s is no address\n", address);
		return 2;
	}
	if (err) {
		fprintf(stderr, "muslresolve: %s: %s\n", address, gai_strerror(err));
		return 1;
	}
	puts(host);
	return 0;
}

static int records(int type, const char *name)
{
	unsigned char reply[65536];
	char text[NS_MAXDNAME];
	ns_msg msg;
	ns_rr rr;
	int i, len = res_query(name, ns_c_in, type, reply, sizeof(reply));

	if (len < 0 || ns_initparse(reply, len, &msg)) {
		fprintf(stderr, "muslresolve: %s: no usable reply\n", name);
		return 1;
	}
	for (i = 0; i < ns_msg_count(msg, ns_s_an); i++) {
		const unsigned char *data;

		if (ns_parserr(&msg, ns_s_an, i, &rr) || (int)ns_rr_type(rr) != type)
			continue;
		data = ns_rr_rdata(rr);
		if (type == ns_t_srv) {
			if (ns_rr_rdlen(rr) < 7 || dn_expand(reply, reply + len, data + 6, text, sizeof(text)) < 0)
				return 1;
			printf("%d %d %d %s\n", ns_get16(data), ns_get16(data + 2), ns_get16(data + 4), text);
		} else if (ns_rr_rdlen(rr) > 0 && data[0] < ns_rr_rdlen(rr)) {
			printf("%.*s\n", data[0], (const char *)data + 1);
		}
	}
	return 0;
}

int main(int argc, char **argv)
{
	int i, err = 0;

	if (argc < 3) {
		fprintf(stderr, "usage: muslresolve a|aaaa|ptr|srv|txt NAME...\n");
		return 2;
	}
	for (i = 2; i < argc && !err; i++) {
		if (!strcmp(argv[1], "a"))
			err = addresses(AF_INET, argv[i]);
		else if (!strcmp(argv[1], "aaaa"))
			err = addresses(AF_INET6, argv[i]);
		else if (!strcmp(argv[1], "ptr"))
			err = host_name(argv[i]);
		else if (!strcmp(argv[1], "srv"))
			err = records(ns_t_srv, argv[i]);
		else if (!strcmp(argv[1], "txt"))
			err = records(ns_t_txt, argv[i]);
		else
			err = 2;
	}
	return err;
}
