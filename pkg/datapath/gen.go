package datapath

// The compiler is pinned: code of one clang version may pass the verifier where that of another fails.
//
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -tags linux -output-stem dnsbpf -type dns_scope -type dns_zone_shape -type dns_answer -type dns_offer dnsbpf ../../bpf/dnsbpf.bpf.c -- -O2 -g -Wall -Wextra -Werror -Wshadow -std=gnu11 -nostdinc -mcpu=v3 -I../../headers
