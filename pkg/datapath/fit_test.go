//go:build linux

package datapath

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestFitZones(t *testing.T) {
	var many, shapes []string
	for i := range zonesMax + 3 {
		many = append(many, fmt.Sprintf("%03d.example", i))
	}
	for i := range zoneShapesMax {
		shapes = append(shapes, strings.Repeat("x", i+1))
	}
	for name, c := range map[string]struct {
		zones []string
		left  []string
	}{
		"none":                           {nil, nil},
		"few":                            {[]string{"cluster.local", "21.172.in-addr.arpa"}, nil},
		"as many as there may be":        {many[:zonesMax], nil},
		"too many":                       {many, many[zonesMax:]},
		"as many shapes":                 {shapes, nil},
		"one shape more":                 {append(slices.Clone(shapes), "a.b", "y"), []string{"a.b"}},
		"same length, other label count": {append(slices.Clone(shapes), "a.b.c"), []string{"a.b.c"}},
	} {
		t.Run(name, func(t *testing.T) {
			fit, left, err := FitZones(c.zones)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(left, c.left) || len(fit)+len(left) != len(c.zones) {
				t.Errorf("%d fit, left %q, want %q", len(fit), left, c.left)
			}
			if _, _, err := zoneKeys(fit); err != nil {
				t.Errorf("what fits is refused: %v", err)
			}
		})
	}
	if _, _, err := FitZones([]string{"a..b"}); !errors.Is(err, ErrBadZone) {
		t.Errorf("error %v", err)
	}
}
