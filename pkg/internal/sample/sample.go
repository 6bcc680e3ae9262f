// Package sample is for tests with more cases than a run of the suite has time for. `make test` takes some of them, by a
// seed; a test whose name begins with TestLongRun takes them all.
package sample

import (
	"hash/fnv"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
)

// seed of this process.
var seed = sync.OnceValues(func() (uint64, error) {
	if text := os.Getenv("K2S_SEED"); text != "" {
		return strconv.ParseUint(text, 10, 64)
	}
	return rand.Uint64N(1_000_000), nil
})

// Random is a source of random numbers for a test, from the seed of the run and the name of the test: a subtest that is
// run alone draws the same again. K2S_SEED repeats a run.
func Random(tb testing.TB) *rand.Rand {
	tb.Helper()
	number, err := seed()
	if err != nil {
		tb.Fatalf("K2S_SEED: %v", err)
	}
	tb.Logf("K2S_SEED=%d", number)
	name := fnv.New64a()
	_, _ = name.Write([]byte(tb.Name()))
	return rand.New(rand.NewPCG(number, name.Sum64()))
}

// Share is how many of its cases a long test runs: all, or one in K2S_SAMPLE, where CI has no time for all.
func Share(tb testing.TB, cases int) int {
	tb.Helper()
	return max(1, cases/one(tb))
}

// Steps is what a loop over all cases of a long test adds to its counter: 1, or on average K2S_SAMPLE.
func Steps(tb testing.TB) func() int {
	tb.Helper()
	return Some(tb, one(tb))
}

// Some returns what a loop adds to its counter to take one of n cases, on average.
func Some(tb testing.TB, n int) func() int {
	tb.Helper()
	if n == 1 {
		return func() int { return 1 }
	}
	random := Random(tb)
	return func() int { return 1 + random.IntN(2*n-1) }
}

func one(tb testing.TB) int {
	tb.Helper()
	text := os.Getenv("K2S_SAMPLE")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		tb.Fatalf("K2S_SAMPLE is %q: want a number from 1", text)
	}
	return n
}
