# The program is one static binary, so the image holds nothing else. It works on the host's network, eBPF file system
# and resolver, which the one who runs it must hand in:
#
#   docker run --rm --net=host --pid=host --cap-add=NET_ADMIN --cap-add=BPF --cap-add=PERFMON \
#     -v /sys/fs/bpf:/sys/fs/bpf -v /run/k2s-dnsbpf:/run/k2s-dnsbpf -v /var/lib/k2s-dnsbpf:/var/lib/k2s-dnsbpf \
#     -v /etc/kubernetes:/etc/kubernetes:ro IMAGE attach --foreground --resolver=none
#
# --resolver=none, because /etc/resolv.conf of a container is a bind mount that can't be replaced.
FROM golang:1.26-bookworm AS build
ARG VERSION=unknown
WORKDIR /src
# Modules first: they change less often than the sources and are then taken from the cache.
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /k2s-dnsbpf ./cmd/k2s-dnsbpf

FROM scratch
COPY --from=build /src/LICENSE /LICENSE
COPY --from=build /k2s-dnsbpf /usr/local/bin/k2s-dnsbpf
ENTRYPOINT ["/usr/local/bin/k2s-dnsbpf"]
CMD ["attach", "--foreground", "--resolver=none"]
