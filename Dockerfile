# The program is one static binary, so the image holds nothing else. It works on the host's network and eBPF file system,
# which the one who runs it must hand in, with a kubeconfig that may read what README.md lists and no more:
#
#   docker run --rm --net=host --read-only --security-opt=no-new-privileges \
#     --cap-drop=ALL --cap-add=BPF --cap-add=NET_ADMIN --cap-add=NET_BIND_SERVICE --cap-add=PERFMON \
#     -v /sys/fs/bpf:/sys/fs/bpf -v /run/k2s-dnsbpf:/run/k2s-dnsbpf -v /var/lib/k2s-dnsbpf:/var/lib/k2s-dnsbpf \
#     -v /etc/k2s-dnsbpf:/etc/k2s-dnsbpf:ro IMAGE attach --foreground --resolver=none --kubeconfig=/etc/k2s-dnsbpf/kubeconfig
#
# --resolver=none, because a container's /etc/resolv.conf is not the host's. /proc/sys is read-only in a container, so two
# settings must be made on the host before: sysctl -w net.ipv4.conf.lo.route_localnet=1 net.ipv4.conf.lo.accept_local=1
#
# Tested without a container engine: the sources below build so, and what is run so attaches from such a root directory
# with these capabilities and mounts. Pin the base by the digest that your registry has (FROM golang:1.26-bookworm@sha256:...).
FROM golang:1.26-bookworm AS build
ARG VERSION=unknown
WORKDIR /src
# Modules first: they change less often than the sources and are then taken from the cache.
COPY go.mod go.sum ./
RUN go mod download
COPY cmd cmd
COPY pkg pkg
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /k2s-dnsbpf ./cmd/k2s-dnsbpf

FROM scratch
COPY LICENSE /LICENSE
COPY bpf/LICENSES /LICENSES
COPY --from=build /k2s-dnsbpf /usr/local/bin/k2s-dnsbpf
ENTRYPOINT ["/usr/local/bin/k2s-dnsbpf"]
CMD ["attach", "--foreground", "--resolver=none"]
