package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"slices"
	"strings"
)

// panel is a bar for each contestant of a contest.
type panel struct {
	title  string
	bars   []bar
	format func(float64) string
}

// bar ends at value; a line goes from least to most.
type bar struct {
	name               string
	value, least, most float64
}

func (r *Results) panels() []panel {
	var all []panel
	for _, c := range r.Contests {
		bars := func(of func(*Contestant) []float64) []bar {
			var all []bar
			for _, one := range c.Contestants {
				values := of(one)
				all = append(all, bar{one.Name, median(values), slices.Min(values), slices.Max(values)})
			}
			return all
		}
		rates := panel{c.Load.name + ": queries a second", bars(func(one *Contestant) []float64 { return one.figures(rate) }), whole}
		switch {
		case c.From != fromHost || c.Threads != 1:
		case c.Paced:
			all = append(all, panel{
				fmt.Sprintf("%s, %d a second: p99 in us", c.Load.name, r.Options.Pace),
				bars(func(one *Contestant) []float64 { return one.figures(p99) }), whole,
			})
		case c.Load == hot && c.endpoints == 0:
			all = append(all, rates, panel{c.Load.name + ": CPU above the floor's in us for a query", bars(c.aboveFloor), tenth})
		case c.Load != hot:
			all = append(all, rates)
		}
	}
	return all
}

// Sizes in the plot's units.
const (
	panelWidth = 560
	nameWidth  = 230
	barWidth   = 230
	barHeight  = 18
	gap        = 24
)

// plot draws the panels in two columns.
func (r *Results) plot(w io.Writer) error {
	panels := r.panels()
	var body strings.Builder
	top := gap
	for i := 0; i < len(panels); i += 2 {
		height := 0
		for k, p := range panels[i:min(i+2, len(panels))] {
			p.draw(&body, gap+k*panelWidth, top)
			height = max(height, (len(p.bars)+2)*barHeight)
		}
		top += height + gap
	}
	for _, text := range []string{
		strings.Join(r.Host.Versions, "; "),
		fmt.Sprintf("%s, %d CPUs, Linux %s; %s: medians of %d rounds, and their least and most; asked from the host by one thread",
			r.Host.CPU, r.Host.CPUs, r.Host.Kernel, r.Options.command(), r.Options.Rounds),
	} {
		label(&body, gap, top, "start", "#555", text)
		top += barHeight
	}
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" font-family="sans-serif" font-size="11">
<rect width="100%%" height="100%%" fill="#fff"/>
%[3]s</svg>
`, 2*panelWidth+gap, top+gap, body.String())
	return err
}

func (p panel) draw(w io.Writer, left, top int) {
	label(w, left, top+barHeight/2, "start", "#000", p.title)
	values := make([]float64, 0, len(p.bars))
	for _, b := range p.bars {
		values = append(values, b.value)
	}
	// One that is far off would leave no room for the others: it is cut, and its figure tells.
	scale := min(slices.Max(values), 5*median(values))
	if scale <= 0 {
		scale = 1
	}
	length := func(v float64) float64 { return barWidth * min(max(v, 0), scale*1.05) / scale }
	for i, b := range p.bars {
		y := top + (i+1)*barHeight
		colour := "#9aa5b1"
		switch {
		case strings.HasPrefix(b.name, "k2s-dnsbpf"):
			colour = "#00848e"
		case b.name == theFloor:
			colour = "#d5dbe1"
		}
		label(w, left+nameWidth-8, y+barHeight/2, "end", "#000", b.name)
		fmt.Fprintf(w, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", left+nameWidth, y+2, length(b.value), barHeight-4, colour)
		fmt.Fprintf(w, "<path d=\"M%.1f %dH%.1f\" stroke=\"#000\"/>\n",
			float64(left+nameWidth)+length(b.least), y+barHeight/2, float64(left+nameWidth)+length(b.most))
		label(w, left+nameWidth+barWidth+20, y+barHeight/2, "start", "#000", p.format(b.value))
	}
}

// label writes text with its middle at y.
func label(w io.Writer, x, y int, anchor, colour, text string) {
	fmt.Fprintf(w, `<text x="%d" y="%d" text-anchor="%s" dominant-baseline="central" fill="%s">`, x, y, anchor, colour)
	_ = xml.EscapeText(w, []byte(text)) // w is in memory
	fmt.Fprintln(w, "</text>")
}
