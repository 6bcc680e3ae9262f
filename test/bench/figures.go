package main

import (
	"math"
	"slices"
)

// What is read from a turn.
var (
	rate    = func(t Turn) float64 { return t.Rate }
	mean    = func(t Turn) float64 { return microseconds(t.Latency) }
	p50     = func(t Turn) float64 { return microseconds(t.P50) }
	p99     = func(t Turn) float64 { return microseconds(t.P99) }
	p999    = func(t Turn) float64 { return microseconds(t.P999) }
	machine = func(t Turn) float64 { return t.Machine }
	behind  = func(t Turn) float64 { return t.Behind }
)

// figures of a contestant in the order of the rounds.
func (c *Contestant) figures(of func(Turn) float64) []float64 {
	values := make([]float64, 0, len(c.Turns))
	for _, t := range c.Turns {
		values = append(values, of(t))
	}
	return values
}

func (c *Contestant) median(of func(Turn) float64) float64 { return median(c.figures(of)) }

// ratio is the median over the rounds of c's figure divided by other's in the same round.
func (c *Contestant) ratio(other *Contestant, of func(Turn) float64) float64 {
	return median(quotients(c.figures(of), other.figures(of)))
}

// aboveFloor are the rounds' CPU times of the whole machine less the floor's in the same round, and with them less the
// generator's own.
func (c *Contest) aboveFloor(one *Contestant) []float64 {
	values := one.figures(machine)
	for i, floor := range c.contestant(theFloor).figures(machine) {
		values[i] -= floor
	}
	return values
}

func quotients(a, b []float64) []float64 {
	values := make([]float64, len(a))
	for i := range a {
		values[i] = a[i] / b[i]
	}
	return values
}

// contestant of a name; nil if there is none.
func (c *Contest) contestant(name string) *Contestant {
	for _, one := range c.Contestants {
		if one.Name == name {
			return one
		}
	}
	return nil
}

// ours is the contestant that the others are to be beaten by; nil if there is none.
func (c *Contest) ours() *Contestant {
	for _, name := range []string{answered, steered, forwarded} {
		if one := c.contestant(name); one != nil {
			return one
		}
	}
	return nil
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// medianInterval has the true median in it with a confidence of 95 %, whatever the distribution: by the ranks around the
// middle that a fair coin stays within.
func medianInterval(values []float64) (low, high float64) {
	sorted := slices.Sorted(slices.Values(values))
	n := float64(len(sorted))
	reach := 0.98 * math.Sqrt(n)
	return sorted[max(0, int(math.Floor(n/2-reach)))], sorted[min(len(sorted)-1, int(math.Ceil(n/2+reach)))]
}
