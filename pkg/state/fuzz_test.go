package state

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// FuzzJournal: whatever is in the file, it is read to a journal that can be written on, or is damage. A body is sealed, too,
// so that what is behind the checksum is reached.
func FuzzJournal(f *testing.F) {
	for _, body := range []string{
		``, `{}`, `{"header":{"params":{"a":1}},"changes":[{"kind":"k","name":"n","data":null}]}`,
		`{"changes":[{"data":[[[[[[]]]]]]},{"kind":"\u0000"}],"generation":18446744073709551615}`, `[]`, `null`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		sealed, err := json.Marshal(envelope{Format: formatVersion, SHA256: checksum(data), Body: data})
		if err != nil {
			sealed = data
		}
		for _, raw := range [][]byte{data, sealed} {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, FileName), raw, 0o600); err != nil {
				t.Fatal(err)
			}
			j, err := Open(dir)
			if err != nil {
				continue
			}
			before := len(j.Changes())
			if err := j.Record("fuzz", "x", nil); err != nil {
				t.Fatal(err)
			}
			again, err := Open(dir)
			if err != nil || again.Recovered() != nil || len(again.Changes()) > before+1 {
				t.Fatalf("%q: written on it is %v, %v", raw, err, again)
			}
			if known, err := again.Lookup("fuzz", "x", nil); !known || err != nil {
				t.Fatalf("%q: the record is lost: %v", raw, err)
			}
		}
	})
}
