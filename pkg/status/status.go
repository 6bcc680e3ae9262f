// Package status is the report behind "k2s-dnsbpf status": what it says, and how it is written for people and for
// programs. It collects nothing itself.
package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

// Report is one look at a host. Its JSON form is a contract: fields are added, never renamed.
type Report struct {
	Attached bool       `json:"attached" yaml:"attached"`
	Healthy  bool       `json:"healthy" yaml:"healthy"`
	Problems []string   `json:"problems,omitempty" yaml:"problems,omitempty"`
	Topology string     `json:"topology,omitempty" yaml:"topology,omitempty"`
	Since    *time.Time `json:"since,omitempty" yaml:"since,omitempty"`
	Version  string     `json:"version,omitempty" yaml:"version,omitempty"`
	// Command is the version of the command that asks, if it is another one.
	Command    string              `json:"command,omitempty" yaml:"command,omitempty"`
	PID        int                 `json:"pid,omitempty" yaml:"pid,omitempty"`
	Resolver   Resolver            `json:"resolver" yaml:"resolver"`
	Datapath   Datapath            `json:"datapath" yaml:"datapath"`
	Zones      []Zone              `json:"zones" yaml:"zones"`
	Endpoints  []Endpoint          `json:"endpoints" yaml:"endpoints"`
	Cache      *Cache              `json:"cache,omitempty" yaml:"cache,omitempty"`
	Forwarder  Forwarder           `json:"forwarder" yaml:"forwarder"`
	Counters   map[string]Counters `json:"counters" yaml:"counters"`
	Discovery  *Discovery          `json:"discovery,omitempty" yaml:"discovery,omitempty"`
	Reasons    map[string]Reasons  `json:"reasons,omitempty" yaml:"reasons,omitempty"`
	Kubeconfig string              `json:"kubeconfig,omitempty" yaml:"kubeconfig,omitempty"`
	Guardian   *Guardian           `json:"guardian,omitempty" yaml:"guardian,omitempty"`
	Lingering  *Lingering          `json:"lingering,omitempty" yaml:"lingering,omitempty"`
	Shared     *Shared             `json:"shared,omitempty" yaml:"shared,omitempty"`
}

// Shared is a KubeSwitch address where another server has the port.
type Shared struct {
	Address   string `json:"address" yaml:"address"`
	Interface string `json:"interface" yaml:"interface"`
	Server    string `json:"server" yaml:"server"`   // the process, as far as it can be seen
	Steered   bool   `json:"steered" yaml:"steered"` // cluster names are steered past it
}

func (s Shared) String() string {
	if !s.Steered {
		return fmt.Sprintf("leave all that is asked at %s to %s", s.Address, s.Server)
	}
	return fmt.Sprintf("steer cluster names that are asked by UDP at %s past %s, leave all else to it", s.Address, s.Server)
}

// Lingering is a daemon that answers on after a detach.
type Lingering struct {
	PID    int       `json:"pid" yaml:"pid"`
	Until  time.Time `json:"until" yaml:"until"` // at least
	Listen []string  `json:"listen" yaml:"listen"`
}

// Resolver is the state of resolv.conf.
type Resolver struct {
	State     string   `json:"state" yaml:"state"` // original, ours, foreign, contended, missing, transparent, unknown
	File      string   `json:"file" yaml:"file"`
	Owner     string   `json:"owner" yaml:"owner"` // whose the file was before
	Upstreams []string `json:"upstreams" yaml:"upstreams"`
	Search    []string `json:"search" yaml:"search"`
	// SteeredAt are the loopback addresses of the host's own resolver that queries are steered past, in transparent mode.
	SteeredAt []string `json:"steered_at,omitempty" yaml:"steered_at,omitempty"`
	// OwnerReasons are what the owner was told by.
	OwnerReasons []string `json:"owner_reasons,omitempty" yaml:"owner_reasons,omitempty"`
	// Skipped are servers and lines of the file that are not used, each with the reason.
	Skipped []string `json:"skipped,omitempty" yaml:"skipped,omitempty"`
	// Note says why a state that is not ours is as it should be.
	Note string `json:"note,omitempty" yaml:"note,omitempty"`
	// Events are the last changes by others while attached, oldest first.
	Events []ResolverEvent `json:"events,omitempty" yaml:"events,omitempty"`
}

// ResolverEvent is one change of the resolver file by somebody else.
type ResolverEvent struct {
	Time   time.Time `json:"time" yaml:"time"`
	What   string    `json:"what" yaml:"what"`
	By     string    `json:"by" yaml:"by"` // "unknown" if it cannot be known
	Action string    `json:"action" yaml:"action"`
	// Count is how often it happened until Last, if more than once.
	Count int        `json:"count,omitempty" yaml:"count,omitempty"`
	Last  *time.Time `json:"last,omitempty" yaml:"last,omitempty"`
}

// Guardian is the process that restores the resolver file when the daemon dies or hangs.
type Guardian struct {
	PID      int        `json:"pid,omitempty" yaml:"pid,omitempty"`
	Restarts int        `json:"restarts" yaml:"restarts"` // since attach, after it was killed
	Restored *time.Time `json:"restored,omitempty" yaml:"restored,omitempty"`
	Outcome  []string   `json:"outcome,omitempty" yaml:"outcome,omitempty"` // of that
}

// Datapath is what is in the kernel.
type Datapath struct {
	Programs []Program `json:"programs" yaml:"programs"`
	Pinned   string    `json:"pinned,omitempty" yaml:"pinned,omitempty"` // the pin directory
	// Unseen says which programs could not be looked for, and why.
	Unseen string `json:"unseen,omitempty" yaml:"unseen,omitempty"`
	// Events are what others have taken away while attached, oldest first.
	Events []KernelEvent `json:"events,omitempty" yaml:"events,omitempty"`
}

// KernelEvent is something that was put into the kernel and found missing or changed there.
type KernelEvent struct {
	Time   time.Time `json:"time" yaml:"time"`
	What   string    `json:"what" yaml:"what"`
	Action string    `json:"action" yaml:"action"`
	// Count is how often it happened until Last, if more than once.
	Count int        `json:"count,omitempty" yaml:"count,omitempty"`
	Last  *time.Time `json:"last,omitempty" yaml:"last,omitempty"`
}

// Program is one attached program.
type Program struct {
	Name      string `json:"name" yaml:"name"`
	Attach    string `json:"attach" yaml:"attach"`
	Interface string `json:"interface" yaml:"interface"`
	KernelID  uint32 `json:"kernel_id" yaml:"kernel_id"`
}

// Zone is a cluster zone and the group of endpoints that answers it.
type Zone struct {
	Name  string `json:"name" yaml:"name"`
	Group string `json:"group" yaml:"group"`
	// Source is where the zone is from: settings, default, or what in the cluster says so.
	Source string `json:"source,omitempty" yaml:"source,omitempty"`
}

// Endpoint is one CoreDNS endpoint. Without an interface it is not steered to: only the forwarder asks it.
type Endpoint struct {
	Address   string `json:"address" yaml:"address"`
	Interface string `json:"interface" yaml:"interface"`
	Healthy   bool   `json:"healthy" yaml:"healthy"`
	Source    string `json:"source" yaml:"source"`
	Note      string `json:"note,omitempty" yaml:"note,omitempty"`
	// Severed says that what the kernel steers to it is lost, while it answers when asked directly.
	Severed bool `json:"severed,omitempty" yaml:"severed,omitempty"`
}

// Forwarder is the userspace server.
type Forwarder struct {
	Listen   []string `json:"listen" yaml:"listen"`
	Queries  uint64   `json:"queries" yaml:"queries"`
	Failures uint64   `json:"failures" yaml:"failures"`
	// Cached are queries that it answered with what upstream servers had said before.
	Cached uint64 `json:"cached,omitempty" yaml:"cached,omitempty"`
	// Loops are queries that came back to it, and Loop says which was the last, if that is not long ago.
	Loops uint64 `json:"loops,omitempty" yaml:"loops,omitempty"`
	Loop  string `json:"loop,omitempty" yaml:"loop,omitempty"`
}

// Counters are the kernel's, of one scope.
type Counters struct {
	Steered  uint64 `json:"steered" yaml:"steered"` // sent to an endpoint
	Replied  uint64 `json:"replied" yaml:"replied"` // of these, those whose reply was delivered
	Answered uint64 `json:"answered" yaml:"answered"`
	Passed   uint64 `json:"passed" yaml:"passed"`
	Refused  uint64 `json:"refused" yaml:"refused"`
}

// Reasons are the kernel's counters of one scope by reason, those that are not zero.
type Reasons map[string]uint64

// Discovery says where endpoints and zones come from and how fresh they are.
type Discovery struct {
	// Service is the followed one, as namespace/name; empty if the endpoints are those of the settings.
	Service string `json:"service,omitempty" yaml:"service,omitempty"`
	// Updated is when the set was last known to be true, and AgeSeconds how long that was ago.
	Updated    time.Time `json:"updated" yaml:"updated"`
	AgeSeconds int64     `json:"age_seconds" yaml:"age_seconds"`
	// Stale says that the set is the last good one, and Reason why it can't be confirmed.
	Stale  bool   `json:"stale" yaml:"stale"`
	Reason string `json:"reason,omitempty" yaml:"reason,omitempty"`
	// Notes say what could not be read or understood, and is not needed.
	Notes []string `json:"notes,omitempty" yaml:"notes,omitempty"`
}

// Format names a form of output.
type Format string

// The formats.
const (
	Table Format = "table"
	JSON  Format = "json"
	YAML  Format = "yaml"
)

// ParseFormat checks the name of a format.
func ParseFormat(name string) (Format, error) {
	switch format := Format(name); format {
	case Table, JSON, YAML:
		return format, nil
	}
	return "", fmt.Errorf("output format %q: write table, json or yaml", name)
}

// Summary says in one line what an attach has come to.
func (r Report) Summary() string {
	others := "to " + say.Count(len(r.Resolver.Upstreams), "upstream")
	if len(r.Resolver.SteeredAt) > 0 {
		others = "left to the resolver at " + strings.Join(r.Resolver.SteeredAt, " and ")
	}
	text := fmt.Sprintf("attached: %s to %s, all other names %s",
		say.Count(len(r.Zones), "zone"), say.Count(len(r.Endpoints), "endpoint"), others)
	if r.Shared != nil {
		text += "; KubeSwitch: " + r.Shared.String()
	}
	return text
}

// Write writes the report.
func (r Report) Write(w io.Writer, format Format) error {
	r.Resolver.Upstreams = orEmpty(r.Resolver.Upstreams)
	r.Resolver.Search = orEmpty(r.Resolver.Search)
	r.Datapath.Programs = orEmpty(r.Datapath.Programs)
	r.Zones = orEmpty(r.Zones)
	r.Endpoints = orEmpty(r.Endpoints)
	r.Forwarder.Listen = orEmpty(r.Forwarder.Listen)
	if r.Counters == nil {
		r.Counters = map[string]Counters{}
	}
	return Encode(w, format, r, r.writeTable)
}

// Encode writes a report in one of the forms, see Printable. table writes it as a table.
func Encode(w io.Writer, format Format, report any, table func(io.Writer) error) error {
	var whole bytes.Buffer
	var err error
	switch format {
	case JSON:
		encoder := json.NewEncoder(&whole)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(report)
	case YAML:
		encoder := yaml.NewEncoder(&whole)
		encoder.SetIndent(2)
		err = errors.Join(encoder.Encode(report), encoder.Close())
	default:
		err = table(&whole)
	}
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, Printable(whole.String(), "\n"))
	return err
}

// Printable is a text that others had a part in as it may reach a terminal: what is not printable, and not in keep, is
// escaped.
func Printable(text, keep string) string { return say.Printable(text, keep) }

// Row writes the cells of one row of a table, each on its one line.
func Row(w io.Writer, cells ...string) {
	for i, cell := range cells {
		cells[i] = Printable(cell, "")
	}
	fmt.Fprintln(w, strings.Join(cells, "\t"))
}

// orEmpty makes a list of nothing an empty one: JSON has null for a nil one, which no script expects.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// scopeOrder is the order of scopes in the table; a map has none.
var scopeOrder = []string{"host", "kubeswitch", "pod", "transparent", "shared"}

func (r Report) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range r.summaryRows() {
		Row(t, cells...)
	}
	// Each table has columns of its own width.
	for _, rows := range [][][]string{r.kernelEventRows(), r.resolverEventRows(), r.endpointRows(), r.programRows(), r.counterRows()} {
		if len(rows) < 2 {
			continue // a heading alone
		}
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(t)
		for _, cells := range rows {
			Row(t, cells...)
		}
	}
	return t.Flush()
}

func (r Report) summaryRows() (rows [][]string) {
	row := func(cells ...string) { rows = append(rows, cells) }
	each := func(name string, lines []string) {
		for _, line := range lines {
			row(name, line)
		}
	}
	row("STATE", r.stateLine())
	each("PROBLEM", r.Problems)
	if r.Attached {
		row("TOPOLOGY", r.Topology)
		if r.Command != "" {
			row("VERSION", fmt.Sprintf("the daemon's is %s, this command's %s: run k2s-dnsbpf attach to go over to that", r.Version, r.Command))
		}
	}
	row("RESOLVER", r.resolverLine())
	each("OWNER", r.Resolver.OwnerReasons)
	row("UPSTREAMS", orDash(r.Resolver.Upstreams))
	each("SKIPPED", r.Resolver.Skipped)
	if len(r.Resolver.Search) > 0 {
		row("SEARCH", orDash(r.Resolver.Search))
	}
	if r.Attached {
		rows = append(rows, r.attachedRows()...)
	}
	if r.Datapath.Unseen != "" {
		row("NOTE", r.Datapath.Unseen)
	}
	if r.Discovery != nil {
		row("DISCOVERY", r.Discovery.line())
		each("NOTE", r.Discovery.Notes)
	}
	return rows
}

func (r Report) attachedRows() (rows [][]string) {
	forwarder := fmt.Sprintf("%s; %s, %s", orDash(r.Forwarder.Listen), say.Count(r.Forwarder.Queries, "query"), say.Count(r.Forwarder.Failures, "failure"))
	if r.Forwarder.Cached > 0 {
		forwarder += fmt.Sprintf(", %d from its cache", r.Forwarder.Cached)
	}
	rows = append(rows, []string{"FORWARDER", forwarder})
	if r.Cache != nil {
		rows = append(rows, []string{"CACHE", r.Cache.line() + "; " + r.share()})
	}
	if r.Shared != nil {
		rows = append(rows, []string{"KUBESWITCH", r.Shared.String()})
	}
	names := make([]string, 0, len(r.Zones))
	for _, zone := range r.Zones {
		names = append(names, zone.Name)
	}
	rows = append(rows, []string{"ZONES", orDash(names)})
	if r.Guardian != nil && r.Guardian.PID != 0 {
		rows = append(rows, []string{"GUARDIAN", fmt.Sprintf("pid %d, started again %s", r.Guardian.PID, say.Count(r.Guardian.Restarts, "time"))})
	}
	return rows
}

func (r Report) kernelEventRows() [][]string {
	rows := [][]string{{"KERNEL", "CHANGE", "ACTION"}}
	for _, e := range r.Datapath.Events {
		rows = append(rows, []string{span(e.Time, e.Last, e.Count), e.What, e.Action})
	}
	return rows
}

func (r Report) resolverEventRows() [][]string {
	rows := [][]string{{"RESOLVER FILE", "CHANGE", "BY", "ACTION"}}
	for _, e := range r.Resolver.Events {
		rows = append(rows, []string{span(e.Time, e.Last, e.Count), e.What, e.By, e.Action})
	}
	return rows
}

func (r Report) endpointRows() [][]string {
	rows := [][]string{{"ENDPOINT", "INTERFACE", "HEALTHY", "SOURCE", "NOTE"}}
	for _, e := range r.Endpoints {
		rows = append(rows, []string{e.Address, orDash([]string{e.Interface}), yesNo(e.Healthy), e.Source, e.Note})
	}
	return rows
}

func (r Report) programRows() [][]string {
	rows := [][]string{{"PROGRAM", "HOOK", "INTERFACE", "ID"}}
	for _, p := range r.Datapath.Programs {
		rows = append(rows, []string{p.Name, p.Attach, p.Interface, fmt.Sprint(p.KernelID)})
	}
	return rows
}

func (r Report) counterRows() [][]string {
	rows := [][]string{{"SCOPE", "STEERED", "REPLIED", "ANSWERED", "PASSED", "REFUSED"}}
	for _, scope := range scopeOrder {
		if c, ok := r.Counters[scope]; ok && (c != Counters{} || scope == "host") {
			rows = append(rows, []string{scope, fmt.Sprint(c.Steered), fmt.Sprint(c.Replied), fmt.Sprint(c.Answered), fmt.Sprint(c.Passed), fmt.Sprint(c.Refused)})
		}
	}
	return rows
}

func (r Report) stateLine() string {
	if !r.Attached {
		state := "not attached"
		if l := r.Lingering; l != nil {
			state += fmt.Sprintf(", lingering until %s or later on %s, pid %d", l.Until.Format(time.RFC3339), orDash(l.Listen), l.PID)
		}
		return state
	}
	state := "attached, healthy"
	if !r.Healthy {
		state = "attached, NOT healthy"
	}
	if r.Since != nil {
		state += ", since " + r.Since.Format(time.RFC3339)
	}
	if r.PID != 0 {
		state += fmt.Sprintf(", pid %d", r.PID)
	}
	return state
}

func (d Discovery) line() string {
	age := time.Duration(d.AgeSeconds) * time.Second
	switch {
	case d.Service == "":
		return "endpoints of the settings"
	case d.Stale:
		return fmt.Sprintf("Service %s; the last good set is in use, %s old", d.Service, age)
	}
	return fmt.Sprintf("Service %s; confirmed %s ago", d.Service, age)
}

func (r Report) resolverLine() string {
	line := r.Resolver.File + " is " + r.Resolver.State
	if len(r.Resolver.SteeredAt) > 0 {
		line = r.Resolver.File + " is left alone, cluster names asked at " + strings.Join(r.Resolver.SteeredAt, " ") + " are steered"
	}
	if r.Resolver.Owner != "" {
		line += ", owner: " + r.Resolver.Owner
	}
	if r.Resolver.Note != "" {
		line += ": " + r.Resolver.Note
	}
	return line
}

func orDash(values []string) string {
	if text := strings.Join(values, " "); text != "" {
		return text
	}
	return "-"
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

// span says when something happened, and how often until when.
func span(first time.Time, last *time.Time, count int) string {
	text := first.Format(time.RFC3339)
	if last != nil {
		text += fmt.Sprintf(" (%d until %s)", count, last.Format(time.TimeOnly))
	}
	return text
}
