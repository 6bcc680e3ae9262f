package main

import "fmt"

// goal is a ratio, or a difference, that is to be reached.
type goal struct {
	what  string
	got   float64
	least bool // the bound is the least, otherwise the most
	bound float64
}

func (g goal) reached() bool {
	if g.least {
		return g.got >= g.bound
	}
	return g.got <= g.bound
}

// cacheEntries are the entries of the answer cache by default.
const cacheEntries = 16_384

// goals are those about which this run can tell something.
func (r *Results) goals() []goal {
	var all []goal
	for _, c := range r.Contests {
		if one := c.contestant(answered); one != nil {
			all = append(all, r.answeredGoals(c, one)...)
		}
		if one := c.contestant(steered); one != nil && c.Load == hot && c.From == fromHost && c.Threads == 1 && !c.Paced {
			direct := c.contestant(directly)
			all = append(all,
				goal{"steered, rate of direct: " + c.Title, one.ratio(direct, rate), true, 0.97},
				goal{"steered, CPU of direct: " + c.Title, one.ratio(direct, machine), false, 1.05})
		}
		if one := c.contestant(forwarded); one != nil && c.Load == outsideOnce {
			all = append(all, goal{"forwarded, CPU of dnsmasq's: " + c.Title, one.ratio(c.contestant("dnsmasq"), machine), false, 1})
		}
	}
	for _, l := range r.Latency {
		what := fmt.Sprintf("steered, median latency above direct in us, endpoints: %d", l.Endpoints)
		all = append(all, goal{what, microseconds(l.DifferenceP50), false, 3})
	}
	if r.Loopback != nil {
		all = append(all, goal{"attached, rate of detached: " + loopbackTitle, median(r.Loopback.Ratios), true, 0.99})
	}
	return all
}

func (r *Results) answeredGoals(c *Contest, one *Contestant) []goal {
	dnsmasq, unbound, coredns := c.contestant("dnsmasq"), c.contestant("unbound"), c.contestant(corednsName)
	aboveFloor := func(other *Contestant) float64 { return median(quotients(c.aboveFloor(one), c.aboveFloor(other))) }
	switch {
	case c.Load == zipf:
		var short []float64
		for _, t := range one.Turns {
			ideal := idealHits(zipf.what(nil, 0), cacheEntries, manyTTL, r.Options.Warm, r.Options.Time, t.Rate)
			short = append(short, 100*(ideal-(1-t.Behind)))
		}
		return []goal{{"answered, hits short of an ideal LFU's in points: " + c.Title, median(short), false, 2}}
	case c.Load == hot && c.Paced:
		return []goal{{"answered, p99 of dnsmasq's: " + c.Title, one.ratio(dnsmasq, p99), false, 0.5}}
	case c.Load == hot && c.Threads == 1:
		return []goal{
			{"answered, rate of the floor's: " + c.Title, one.ratio(c.contestant(theFloor), rate), true, 0.9},
			{"answered, rate of dnsmasq's: " + c.Title, one.ratio(dnsmasq, rate), true, 2},
			{"answered, rate of unbound's: " + c.Title, one.ratio(unbound, rate), true, 2},
			{"answered, CPU above the floor's, of dnsmasq's: " + c.Title, aboveFloor(dnsmasq), false, 0.1},
			{"answered, CPU above the floor's, of CoreDNS with cache's: " + c.Title, aboveFloor(coredns), false, 0.05},
		}
	case c.Load == hot:
		return []goal{{"answered, rate of the floor's: " + c.Title, one.ratio(c.contestant(theFloor), rate), true, 0.9}}
	case c.Load == outside:
		return []goal{{"forwarder's cache, rate of unbound's: " + c.Title, c.contestant(userSpace).ratio(unbound, rate), true, 1}}
	}
	return nil
}
