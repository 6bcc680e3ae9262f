//go:build linux

package control

import (
	"bufio"
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
)

// FuzzControl: whatever is sent to the control socket is answered or refused, and obeyed only if root sent it.
func FuzzControl(f *testing.F) {
	for _, request := range []string{
		"GET /status HTTP/1.1\r\nHost: x\r\n\r\n", "POST /reload HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
		"POST /detach HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n{\"linger\":-1}", "POST /reload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
		"POST /detach HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n[[[[[[[[[[", "GET /../detach HTTP/1.0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\n",
	} {
		f.Add([]byte(request), true)
		f.Add([]byte(request), false)
	}
	f.Fuzz(func(t *testing.T, raw []byte, root bool) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
		if err != nil {
			return
		}
		uid := uint32(1000)
		if root {
			uid = 0
		}
		r = r.WithContext(context.WithValue(r.Context(), peerKey{}, uid))
		for _, order := range []any{new(config.Config), new(DetachOrder)} {
			w := httptest.NewRecorder()
			accepted := new(server).accept(w, r, order)
			if accepted && !root {
				t.Fatalf("%q: obeyed", raw)
			}
			if !accepted && w.Code != http.StatusForbidden && w.Code != http.StatusBadRequest {
				t.Fatalf("%q: %d", raw, w.Code)
			}
		}
	})
}
