package status

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/internal/say"
)

// Cache is what can be said of the cache of answers as a whole. Counts are since the daemon's start.
type Cache struct {
	On       bool `json:"on" yaml:"on"`
	Coherent bool `json:"coherent" yaml:"coherent"` // changes of the cluster are told
	// Coherence is off, lost, forbidden or coherent; Reason says why it is not the last.
	Coherence string `json:"coherence" yaml:"coherence"`
	Reason    string `json:"reason,omitempty" yaml:"reason,omitempty"`
	Entries   int    `json:"entries" yaml:"entries"`
	Negative  int    `json:"negative" yaml:"negative"` // NXDOMAIN and NODATA among them
	Room      int    `json:"room" yaml:"room"`         // for so many
	Octets    int    `json:"octets" yaml:"octets"`     // of the answers themselves

	Stored    uint64 `json:"stored" yaml:"stored"`
	Asked     uint64 `json:"asked" yaml:"asked"`         // asked for by the daemon itself, before their end above all
	Expired   uint64 `json:"expired" yaml:"expired"`     // at their end
	Ended     uint64 `json:"ended" yaml:"ended"`         // by a change of the cluster
	Displaced uint64 `json:"displaced" yaml:"displaced"` // by what is asked for more often
	Lost      uint64 `json:"lost" yaml:"lost"`           // replies that nobody looked at, since there were too many

	// Refused counts replies that were not kept, by reason.
	Refused map[string]uint64 `json:"refused" yaml:"refused"`
	Zones   []CachedZone      `json:"zones" yaml:"zones"`
}

// CachedZone is about one zone. The empty one is of all names outside of the cluster's.
type CachedZone struct {
	Zone    string `json:"zone" yaml:"zone"`
	Off     string `json:"off,omitempty" yaml:"off,omitempty"` // why nothing is kept of it
	Entries int    `json:"entries" yaml:"entries"`
	Uses    uint64 `json:"uses" yaml:"uses"` // of those that are there, about
}

// CachedAnswer is one answer.
type CachedAnswer struct {
	Name    string `json:"name" yaml:"name"`
	Type    string `json:"type" yaml:"type"`
	Zone    string `json:"zone,omitempty" yaml:"zone,omitempty"`
	Rcode   string `json:"rcode" yaml:"rcode"`       // or NODATA
	TTL     uint32 `json:"ttl" yaml:"ttl"`           // in seconds, as its source gave it
	TTLLeft uint32 `json:"ttl_left" yaml:"ttl_left"` // in seconds, until its end
	Uses    uint64 `json:"uses" yaml:"uses"`         // about
	Why     string `json:"why" yaml:"why"`           // it is kept, and not for longer
}

// CachedAnswers is a list of them.
type CachedAnswers []CachedAnswer

// Write writes the cache in one of the forms.
func (c Cache) Write(w io.Writer, format Format) error {
	c.Zones = orEmpty(c.Zones)
	if c.Refused == nil {
		c.Refused = map[string]uint64{}
	}
	return Encode(w, format, c, c.writeTable)
}

func (c Cache) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	Row(t, "CACHE", c.line())
	Row(t, "SINCE THE START", fmt.Sprintf("%d stored, %d of them asked for by the daemon before their end, %d expired, %d ended by changes of the cluster, %d displaced",
		c.Stored, c.Asked, c.Expired, c.Ended, c.Displaced))
	if refused := c.refused(); refused != "" {
		Row(t, "NOT KEPT", refused)
	}
	if len(c.Zones) > 0 {
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(t)
		Row(t, "ZONE", "ANSWERS", "USES", "NOTE")
		for _, zone := range c.Zones {
			note := ""
			if zone.Off != "" {
				note = "nothing is kept: " + zone.Off
			}
			name := zone.Zone
			if name == "" {
				name = "(all others)"
			}
			Row(t, name, fmt.Sprint(zone.Entries), fmt.Sprint(zone.Uses), note)
		}
	}
	return t.Flush()
}

// line is the cache in one line.
func (c Cache) line() string {
	if !c.On {
		return strings.TrimSuffix("off: each query is asked: "+c.Reason, ": ")
	}
	text := fmt.Sprintf("%s of %d, %d of them negative, %d octets; ", say.Count(uint64(c.Entries), "answer"), c.Room, c.Negative, c.Octets)
	if c.Coherent {
		return text + "changes of the cluster end them at once"
	}
	return text + "those of the cluster live for 5 s at most, since no change is told: " + c.Coherence + ": " + c.Reason
}

// refused says what was not kept, most frequent first.
func (c Cache) refused() string {
	reasons := slices.SortedFunc(maps.Keys(c.Refused), func(a, b string) int { return int(c.Refused[b]) - int(c.Refused[a]) })
	var texts []string
	for _, reason := range reasons {
		texts = append(texts, fmt.Sprintf("%d %s", c.Refused[reason], strings.ReplaceAll(reason, "_", " ")))
	}
	if c.Lost > 0 {
		texts = append(texts, fmt.Sprintf("%d not looked at", c.Lost))
	}
	return strings.Join(texts, ", ")
}

// Write writes the list in one of the forms.
func (l CachedAnswers) Write(w io.Writer, format Format) error {
	return Encode(w, format, orEmpty(l), func(w io.Writer) error {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		Row(t, "NAME", "TYPE", "ANSWER", "TTL", "LEFT", "USES", "WHY")
		for _, a := range l {
			Row(t, a.Name, a.Type, a.Rcode, fmt.Sprint(a.TTL), fmt.Sprint(a.TTLLeft), fmt.Sprint(a.Uses), a.Why)
		}
		return t.Flush()
	})
}

// share is how much of what was asked was answered in the kernel.
func (r Report) share() string {
	var answered, asked uint64
	for _, c := range r.Counters {
		answered += c.Answered
		asked += c.Answered + c.Steered + c.Passed
	}
	if asked == 0 {
		return "nothing asked yet"
	}
	return fmt.Sprintf("%.1f %% of %s answered in the kernel", 100*float64(answered)/float64(asked), say.Count(asked, "query"))
}
