package control

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/config"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/errno"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/rundir"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/state"
	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/status"
)

// Timeout limits a request to the daemon, because a stopped daemon must not hang the client.
const Timeout = time.Second

// LookAgain is the interval at which a vanished daemon, and its lock, are looked for again.
const LookAgain = 20 * time.Millisecond

// Limits on what is read from the control socket, in bytes.
const (
	maxHeader = 4 << 10
	maxOrder  = 1 << 20
	maxReply  = 64 << 20
)

// Errors of a request, besides those that the daemon reports itself.
var (
	// ErrNoDaemon: no process has the host's lock. The daemon has ended or died, perhaps during the request.
	ErrNoDaemon = errors.New("no daemon")
	// ErrNotServing: a process has the lock and accepts no orders: a daemon that is starting or stopping, another command, or a
	// guardian.
	ErrNotServing = errors.New("another attach or detach is in progress: wait for it, or end it with k2s-dnsbpf detach")
	// ErrHangs: the holder of the lock does not answer in time.
	ErrHangs = errors.New("the daemon does not answer")
	// ErrStays: the daemon refuses to detach.
	ErrStays = errors.New("still attached")
	// ErrGone is for a single attempt: no process listens, or it went away before the reply was complete.
	ErrGone = errors.New("gone")
)

// ask sends a request over the control socket and waits for the reply for up to limit. If the daemon dies or
// ends meanwhile, however that shows, it is looked for again until it is known what has taken its place: see the
// errors above. That takes up to Timeout longer.
func ask(ctx context.Context, c config.Config, limit time.Duration, method, path string, body []byte, into any) error {
	begin := time.Now()
	for {
		err := call(ctx, c, limit, method, path, body, into)
		if !errors.Is(err, ErrGone) && !errors.Is(err, ErrHangs) {
			return err
		}
		hangs := errors.Is(err, ErrHangs)
		if os.Geteuid() != 0 {
			// Only root can see the lock: whatever accepts a connection counts as a daemon.
			if hangs {
				return err
			}
			return fmt.Errorf("ask the daemon: %w", ErrNoDaemon)
		}
		if _, held := state.Holder(rundir.Lock(c)); !held {
			return fmt.Errorf("ask the daemon: %w", ErrNoDaemon)
		}
		if hangs {
			return err
		}
		if time.Since(begin) > Timeout {
			return ErrNotServing
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("ask the daemon: %w", ctx.Err())
		case <-time.After(LookAgain):
		}
	}
}

// call is one attempt of ask.
func call(ctx context.Context, c config.Config, limit time.Duration, method, path string, body []byte, into any) error {
	asking, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	reply, err := exchange(asking, rundir.Control(c), method, path, body)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return fmt.Errorf("ask the daemon: %w", ctx.Err())
	case asking.Err() != nil:
		return fmt.Errorf("%w within %s", ErrHangs, limit)
	default:
		return fmt.Errorf("ask the daemon: %w", err)
	}
	err = json.Unmarshal(reply, into)
	var cut *json.SyntaxError
	if errors.As(err, &cut) {
		return fmt.Errorf("ask the daemon: %w: %w", ErrGone, err)
	}
	if err != nil {
		return fmt.Errorf("ask the daemon: %w: is it of another version?", err)
	}
	return nil
}

// exchange sends one request over a Unix socket and reads the complete reply. Every way in which a connection can break is
// ErrGone.
func exchange(ctx context.Context, socket, method, path string, body []byte) ([]byte, error) {
	conn, err := dialControl(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	request, err := http.NewRequest(method, "http://k2s-dnsbpf"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Close = true
	// A peer that stopped reading may have answered nevertheless.
	sent := request.Write(conn)
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrGone, errors.Join(sent, err))
	}
	defer response.Body.Close()
	reply, err := io.ReadAll(io.LimitReader(response.Body, maxReply))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrGone, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %q", response.Status, strings.TrimSpace(string(reply)))
	}
	return reply, nil
}

// dialControl waits while the queue of connections is full, which connect(2) does not.
func dialControl(ctx context.Context, socket string) (net.Conn, error) {
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		switch {
		case errors.Is(err, os.ErrNotExist), errno.Is(err, syscall.ECONNREFUSED, syscall.ECONNRESET):
			return nil, fmt.Errorf("%w: %w", ErrGone, err)
		case !errno.Is(err, syscall.EAGAIN):
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(LookAgain):
		}
	}
}

// Status asks the daemon for its report. It fails if none answers; see the errors above.
func Status(ctx context.Context, c config.Config) (report status.Report, err error) {
	return report, ask(ctx, c, Timeout, http.MethodGet, pathStatus, nil, &report)
}

// Answers asks the daemon for the answers of a name and of all below it that it keeps, all for "".
func Answers(ctx context.Context, c config.Config, suffix string) (list []status.CachedAnswer, err error) {
	path := pathAnswers + "?" + url.Values{"suffix": {suffix}}.Encode()
	return list, ask(ctx, c, Timeout, http.MethodGet, path, nil, &list)
}

// Flush makes the daemon forget them, and returns how many they were.
func Flush(ctx context.Context, c config.Config, suffix string) (dropped int, err error) {
	body, err := json.Marshal(FlushOrder{suffix})
	if err != nil {
		return 0, err
	}
	var result FlushResult
	err = ask(ctx, c, Timeout, http.MethodPost, pathFlush, body, &result)
	return result.Dropped, err
}

// OtherVersionError is returned by Reload for a daemon of another version.
type OtherVersionError struct {
	Version string
	PID     int
}

func (e *OtherVersionError) Error() string {
	return fmt.Sprintf("the daemon, process %d, is of version %q", e.PID, e.Version)
}

// Reload passes new settings to the running daemon, which switches to them without losing a query. changed is false if
// it already has them. If no daemon accepts orders it fails with ErrNotServing, and with an *OtherVersionError if the daemon's version
// differs.
func Reload(ctx context.Context, c config.Config, version string) (changed bool, err error) {
	body, err := json.Marshal(c)
	if err != nil {
		return false, fmt.Errorf("encode settings: %w", err)
	}
	var result ReloadResult
	var daemon struct {
		Version string `json:"version"`
		PID     int    `json:"pid"`
	}
	// First, since a daemon that hangs is not waited for as long as new settings may take.
	err = ask(ctx, c, Timeout, http.MethodGet, pathStatus, nil, &daemon)
	if err == nil && daemon.Version != version {
		err = &OtherVersionError{daemon.Version, daemon.PID}
	}
	if err == nil {
		err = ask(ctx, c, c.Wait+Timeout, http.MethodPost, pathReload, body, &result)
	}
	switch {
	case errors.Is(err, ErrNoDaemon):
		return false, ErrNotServing
	case errors.Is(err, ErrHangs):
		return false, fmt.Errorf("already attached, but %w: see %s, or end it with k2s-dnsbpf detach", err, filepath.Join(c.RunDir, rundir.LogFile))
	case err != nil:
		return false, err
	}
	if result.Error != "" {
		return false, errors.New(result.Error)
	}
	return result.Changed, nil
}

// Detach ends the daemon as a signal would, except that it lingers for as long as the settings say. It returns what was done to the
// resolver file.
func Detach(ctx context.Context, c config.Config) (done []string, err error) {
	body, err := json.Marshal(DetachOrder{Linger: c.Linger})
	if err != nil {
		return nil, err
	}
	var result DetachResult
	err = ask(ctx, c, DetachLimit, http.MethodPost, pathDetach, body, &result)
	if err == nil && result.Error != "" {
		err = fmt.Errorf("%w: %s", ErrStays, result.Error)
	}
	return result.Done, err
}

// Replace ends the daemon and leaves everything attached to a successor, which has to start soon; otherwise the daemon attaches
// again. own reports whether it starts the successor itself.
func Replace(ctx context.Context, c config.Config) (own bool, err error) {
	var result ReplaceResult
	err = ask(ctx, c, DetachLimit, http.MethodPost, pathReplace, []byte("{}"), &result)
	return result.Own, err
}
