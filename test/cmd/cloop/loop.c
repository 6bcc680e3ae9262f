// Looks names up at a steady rate with the C library it is linked with, in one process, until its standard input ends:
// a program that runs for long, and sees the resolver configuration change. It prints a line for each lookup that fails
// or has an answer other than those given, and one at the end: how many lookups, how many of them failed, the longest
// in microseconds.
//
//	RATE NAME=ADDRESS[,ADDRESS]...
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static long long now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

// known returns whether an address is in a list that commas separate.
static int known(const char *address, const char *list)
{
	size_t len = strlen(address);

	while (list) {
		if (!strncmp(list, address, len) && (list[len] == ',' || !list[len]))
			return 1;
		list = strchr(list, ',');
		if (list)
			list++;
	}
	return 0;
}

// look_up asks for both families at once, as programs do, and judges the IPv4 addresses.
static int look_up(const char *name, const char *want)
{
	struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_DGRAM }, *list, *a;
	char text[INET_ADDRSTRLEN];
	int found = 0, failed = 0;
	int err = getaddrinfo(name, NULL, &hints, &list);

	if (err) {
		printf("%s: %s\n", name, gai_strerror(err));
		return 1;
	}
	for (a = list; a; a = a->ai_next) {
		if (a->ai_family != AF_INET)
			continue;
		found = 1;
		inet_ntop(AF_INET, &((struct sockaddr_in *)a->ai_addr)->sin_addr, text, sizeof(text));
		if (!known(text, want)) {
			printf("%s: answer %s\n", name, text);
			failed = 1;
		}
	}
	freeaddrinfo(list);
	if (!found)
		printf("%s: no IPv4 address\n", name);
	return failed || !found;
}

// ended waits until a time, and returns whether standard input has ended before.
static int ended(long long until_us)
{
	struct pollfd in = { .fd = 0, .events = POLLIN };
	long long left = until_us - now_us();
	struct timespec wait = { .tv_sec = left / 1000000, .tv_nsec = left % 1000000 * 1000 };

	if (left < 0)
		wait = (struct timespec){ 0 };
	return ppoll(&in, 1, &wait, NULL) != 0;
}

int main(int argc, char **argv)
{
	long lookups = 0, failures = 0;
	long long longest = 0, next = now_us(), begin, took;
	long rate;

	if (argc < 3 || (rate = atol(argv[1])) <= 0) {
		fprintf(stderr, "usage: %s RATE NAME=ADDRESS[,ADDRESS]...\n", argv[0]);
		return 2;
	}
	while (!ended(next)) {
		char name[256];
		const char *pair = argv[2 + lookups % (argc - 2)], *want = strchr(pair, '=');

		if (!want || want - pair >= (long)sizeof(name))
			return 2;
		memcpy(name, pair, want - pair);
		name[want - pair] = 0;
		begin = now_us();
		failures += look_up(name, want + 1);
		took = now_us() - begin;
		if (took > longest)
			longest = took;
		lookups++;
		next += 1000000 / rate;
	}
	printf("%ld %ld %lld\n", lookups, failures, longest);
	return 0;
}
