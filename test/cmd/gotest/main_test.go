package main

import (
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const events = `not an event
{"Action":"output","Package":"p","Test":"TestGood","Output":"chatter\n"}
{"Action":"pass","Package":"p","Test":"TestGood/part","Elapsed":1}
{"Action":"pass","Package":"p","Test":"TestGood","Elapsed":2}
{"Action":"pass","Package":"p","Test":"TestParallel/part","Elapsed":9}
{"Action":"pass","Package":"p","Test":"TestParallel","Elapsed":0}
{"Action":"output","Package":"p","Test":"TestBad","Output":"it is bad\n"}
{"Action":"fail","Package":"p","Test":"TestBad","Elapsed":3}
{"Action":"output","Package":"p","Test":"TestSkipped","Output":"no such tool\n"}
{"Action":"skip","Package":"p","Test":"TestSkipped","Elapsed":0}
{"Action":"output","Package":"p","Test":"TestHangs","Output":"it waits\n"}
{"Action":"output","Package":"p","Test":"TestLater","Output":"not begun\n"}
{"Action":"pause","Package":"p","Test":"TestLater"}
{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"output","Package":"p","Output":"FAIL p 4s\n"}
{"Action":"fail","Package":"p","Elapsed":4}
`
	const want = `not an event

p TestBad failed:
it is bad
FAIL p 4s

p TestHangs did not end:
it waits

skipped:
p TestSkipped:
no such tool

the slowest of 5 tests:
    9.00 s  p TestParallel/part
    3.00 s  p TestBad
    2.00 s  p TestGood
`
	var out strings.Builder
	s := newSummary(&out)
	s.read(strings.NewReader(events))
	s.end()
	if got := out.String(); !strings.HasPrefix(got, want) {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
