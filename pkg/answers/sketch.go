package answers

import "hash/maphash"

// sketch estimates how often keys were seen lately (a count-min sketch as in TinyLFU, Einziger, Friedman, Manes 2017). It never
// estimates too little, and what was seen before so many others counts half. It is not safe for concurrent use.
type sketch[K comparable] struct {
	seeds [4]maphash.Seed
	rows  [4][]uint8
	added int
}

func newSketch[K comparable](capacity int) *sketch[K] {
	width := 1024
	for width < 4*capacity {
		width *= 2
	}
	s := &sketch[K]{}
	for i := range s.rows {
		s.rows[i], s.seeds[i] = make([]uint8, width), maphash.MakeSeed()
	}
	return s
}

// add counts a key so many times more.
func (s *sketch[K]) add(key K, times uint64) {
	for i, row := range s.rows {
		counter := &row[s.at(i, key)]
		*counter = uint8(min(uint64(*counter)+times, 255))
	}
	if s.added++; s.added > 4*len(s.rows[0]) {
		s.halve()
	}
}

func (s *sketch[K]) halve() {
	s.added = 0
	for _, row := range s.rows {
		for i := range row {
			row[i] /= 2
		}
	}
}

func (s *sketch[K]) estimate(key K) uint8 {
	least := uint8(255)
	for i, row := range s.rows {
		least = min(least, row[s.at(i, key)])
	}
	return least
}

func (s *sketch[K]) at(row int, key K) uint64 {
	return maphash.Comparable(s.seeds[row], key) & uint64(len(s.rows[row])-1)
}
