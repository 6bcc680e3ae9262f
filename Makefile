# `make` alone lists what can be done. Every target says what it does and needs no other prepared by hand: on a fresh
# Debian or Ubuntu machine with Go, `make test` and `make demo` install what they lack.

MODULE  := github.com/k2s-dnsbpf/k2s-dnsbpf
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
FUZZTIME ?= 30s

# System tools such as unbound and bpftool live in sbin, which is not in every user's path.
export PATH := $(PATH):/usr/sbin:/sbin

# Namespaces and eBPF need root. sudo would drop the path to Go, and the caches would become root's without HOME.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo --preserve-env env "PATH=$(PATH)" "HOME=$(HOME)")

GOLANGCI = go tool -modfile=$(CURDIR)/scripts/tools/go.mod golangci-lint
C_FILES  = $(wildcard bpf/*.c bpf/*.h bpf/lib/*.h test/bench/bpf/*.c test/cmd/*/*.c)

comma := ,
say = @printf '\n==> %s\n' '$(1)'

.DEFAULT_GOAL := help
.PHONY: help build generate helpers test test-unit test-e2e test-cluster test-long long-unit race-unit long-e2e race-e2e test-kernel test-windows demo bench bench-full bench-program cluster lint fmt check-headers verify-generate fuzz vuln clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build bin/k2s-dnsbpf (static; the eBPF objects are committed, so no clang is needed)
	$(call say,building bin/k2s-dnsbpf $(VERSION))
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/k2s-dnsbpf ./cmd/k2s-dnsbpf

generate: ## compile the eBPF programs and write their Go bindings
	$(call say,compiling the eBPF programs)
	@scripts/bootstrap generate
	go generate ./pkg/datapath
	cd test && go generate ./bench

helpers: $(addprefix test/bin/,coredns gotest labctl goresolve goloop muslresolve muslloop glibcloop) ## build what the lab runs, into test/bin

# Only when something it is made of has changed: the first build compiles all of CoreDNS.
test/bin/coredns: test/cmd/coredns/main.go test/go.mod test/go.sum
	$(call say,building CoreDNS for the lab: once$(comma) up to some minutes)
	cd test && CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o bin/coredns ./cmd/coredns
	@touch $@

# What a cluster in the lab is made of, in a module of its own: the first build compiles all of Kubernetes.
cluster: test/bin/kube test/bin/coredns-kubernetes ## build the real Kubernetes that tests run, into test/bin

KUBERNETES = $(shell awk '$$1 == "k8s.io/kubernetes" { print $$2 }' test/kube/go.mod)
KUBE_LDFLAGS = -X k8s.io/component-base/version.gitVersion=$(KUBERNETES) -X k8s.io/component-base/version.gitMajor=1 \
	-X k8s.io/component-base/version.gitMinor=$(word 2,$(subst ., ,$(KUBERNETES))) -X k8s.io/component-base/version.gitTreeState=clean

test/bin/kube: test/kube/cmd/kube/main.go test/kube/go.mod test/kube/go.sum
	$(call say,building Kubernetes for the lab: once$(comma) up to a quarter of an hour)
	cd test/kube && CGO_ENABLED=0 go build -trimpath -ldflags='-s -w $(KUBE_LDFLAGS)' -o ../bin/kube ./cmd/kube
	@touch $@

test/bin/coredns-kubernetes: test/kube/cmd/coredns/main.go test/kube/go.mod test/kube/go.sum
	$(call say,building CoreDNS with its kubernetes plugin)
	cd test/kube && CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o ../bin/coredns-kubernetes ./cmd/coredns
	@touch $@

test/bin/gotest test/bin/labctl test/bin/goresolve test/bin/goloop: test/bin/%: $(wildcard test/cmd/*/*.go test/lab/*.go) test/go.mod test/go.sum
	cd test && CGO_ENABLED=0 go build -trimpath -o bin/$* ./cmd/$*
	@touch $@

test/bin/muslresolve: test/cmd/muslresolve/resolve.c
	@mkdir -p test/bin
	musl-gcc -static -O2 -Wall -Wextra -Werror -o $@ $<

# Only unpacked, never installed: see there.
test/bin/resolved: scripts/fetch-resolved
	$(call say,fetching systemd-resolved for the lab)
	scripts/fetch-resolved $@
	@touch $@

test/bin/muslloop: test/cmd/cloop/loop.c
	@mkdir -p test/bin
	musl-gcc -static -O2 -Wall -Wextra -Werror -o $@ $<

test/bin/glibcloop: test/cmd/cloop/loop.c
	@mkdir -p test/bin
	gcc -O2 -Wall -Wextra -Werror -o $@ $<

# Which suite a test belongs to is in its name. TestKubernetes...: needs a real one. TestLongRun...: all cases of what others
# take a sample of, sizes and durations; K2S_SAMPLE=10 takes a tenth of them. All others run in `make test`.
# K2S_SEED repeats the samples of a run, which prints it. A test that can't run here fails instead of being skipped.
GOTEST   = $(SUDO) env K2S_LAB_REQUIRED=1 K2S_SEED=$(K2S_SEED) K2S_SAMPLE=$(K2S_SAMPLE) $(CURDIR)/test/bin/gotest -count=1
PARALLEL ?= 8
# Of the tests that `make test` has done already, these are done again with a program that has the race detector.
RACE_TESTS ?= .

test: ## install what is missing, build, run the tests of packages and those in the lab (minutes)
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory --keep-going build test-unit test-e2e

test-unit: test/bin/gotest ## run the tests of the product's packages
	$(call say,unit tests)
	$(GOTEST) -timeout 10m -p 4 -skip '^TestLongRun' ./...

test-e2e: build helpers test/bin/resolved ## run the tests in the lab: namespaces, a real CoreDNS, a real unbound
	$(call say,end-to-end tests)
	cd test && $(GOTEST) -timeout 20m -parallel $(PARALLEL) -skip '^Test(Kubernetes|LongRun)' ./...

test-cluster: ## run the tests in the lab with a real Kubernetes
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory build helpers cluster
	$(call say,end-to-end tests with Kubernetes)
	cd test && $(GOTEST) -timeout 30m -run '^TestKubernetes' -parallel 3 ./e2e ./coherence

test-long: ## run what takes long: all faults, sizes, cycles; everything with the race detector
	@scripts/bootstrap test
	@$(MAKE) --no-print-directory --keep-going long-unit race-unit long-e2e race-e2e

long-unit: test/bin/gotest
	$(call say,long tests of packages)
	$(GOTEST) -timeout 60m -run '^TestLongRun' ./...

race-unit: test/bin/gotest
	$(call say,unit tests with the race detector)
	$(GOTEST) -timeout 30m -race -skip '^TestLongRun' ./...

long-e2e: build helpers cluster
	$(call say,long end-to-end tests)
	cd test && $(GOTEST) -timeout 60m -run '^TestLongRun' ./e2e

race-e2e: helpers test/bin/resolved
	$(call say,end-to-end tests of a program with the race detector)
	go build -race -trimpath -o bin/race/k2s-dnsbpf ./cmd/k2s-dnsbpf
	cd test && K2S_DNSBPF=$(CURDIR)/bin/race/k2s-dnsbpf $(GOTEST) -timeout 60m -parallel 4 -run '$(RACE_TESTS)' \
		-skip '^Test(Kubernetes|LongRun[^S]|GuardianIsSmall$$|FloodFromAWorker$$)' ./e2e

test-kernel: ## run the tests that need the kernel on Debian's 6.1, in a virtual machine without KVM
	@scripts/bootstrap kernel
	@$(MAKE) --no-print-directory build
	scripts/test-kernel

test-windows: ## run the unit tests that hold on Windows as Windows programs, under Wine
	@scripts/bootstrap windows
	$(call say,unit tests on Windows)
	scripts/test-windows

demo: ## show it at work in the lab: attach, resolve, look inside, detach
	@scripts/bootstrap demo
	@$(MAKE) --no-print-directory build helpers
	$(SUDO) scripts/demo

bench: bench-program ## measure it side by side with other servers, in minutes; test/bin/bench -help lists options for BENCHFLAGS
	$(SUDO) test/bin/bench -out test/bin/results $(BENCHFLAGS)

bench-full: bench-program ## the same with all loads, for a quarter of an hour; writes docs/bench
	$(SUDO) test/bin/bench -full -out docs/bench $(BENCHFLAGS)

bench-program:
	@scripts/bootstrap bench
	@$(MAKE) --no-print-directory build helpers test/bin/resolved
	cd test && CGO_ENABLED=0 go build -trimpath -o bin/bench ./bench

lint: ## check Go, C and shell sources
	$(call say,linting)
	@scripts/bootstrap lint
	$(GOLANGCI) run ./...
	cd test && $(GOLANGCI) run --config ../.golangci.yml ./...
	GOOS=windows go vet ./cmd/... ./pkg/...
	GOOS=darwin go vet ./cmd/... ./pkg/...
	$(if $(C_FILES),clang-format-19 --dry-run --Werror $(C_FILES))
	shellcheck .ci/run $(shell grep -lE '^#!.*(bash|sh)$$' scripts/* 2>/dev/null)
	@scripts/check-headers

fmt: ## format Go and C sources
	$(call say,formatting)
	gofmt -w $(sort $(dir $(shell git ls-files '*.go')))
	$(if $(C_FILES),clang-format-19 -i $(C_FILES))

check-headers: ## compile every header of bpf/lib by itself
	@scripts/check-headers

verify-generate: ## check that the committed eBPF objects are what the sources make
	@scripts/bootstrap generate
	@scripts/check-generated

fuzz: ## run every fuzz test for FUZZTIME (30s)
	$(call say,fuzzing for $(FUZZTIME) each)
	@set -e; for pkg in $$(go list ./...); do \
		for name in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$name"; \
			$(SUDO) go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) $$pkg; \
		done; \
	done

vuln: ## look for known vulnerabilities in what the program calls (needs the network)
	@scripts/vulnerabilities

clean: ## remove what was built
	rm -rf bin test/bin
