//go:build linux

package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/k2s-dnsbpf/k2s-dnsbpf/pkg/answers/ready"
)

// ErrNoRoom is returned for an answer if all places of its size are taken: drop another one.
var ErrNoRoom = errors.New("the kernel's cache of answers is full")

// AnswersLimits are those of an answer that the kernel programs give.
func AnswersLimits() ready.Limits {
	return ready.Limits{Octets: 1232, Records: 64} // DNS_MESSAGE_MAX, DNS_ANSWER_TTLS_MAX
}

// SmallAnswer is how large an answer may be that has a place for small ones, see ready.Answer.Octets.
func SmallAnswer() int { return smallSize - headSize }

// AnswersSize says how many answers there is room for. Zero means the object's own size.
type AnswersSize struct {
	Small int // of up to 288 octets, name included
	Large int
}

// SizeOfAnswers makes room for so many answers, and for an eighth as many large ones beside.
func SizeOfAnswers(entries int) AnswersSize {
	return AnswersSize{Small: entries, Large: max(1, entries/8)}
}

// Entries is how many answers there is room for.
func (s AnswersSize) Entries() int { return s.Small + s.Large }

const (
	headSize  = int(unsafe.Sizeof(dnsbpfDnsAnswer{}))
	smallSize = int(unsafe.Sizeof(dnsbpfDnsAnswerSmall{}))
	largeSize = int(unsafe.Sizeof(dnsbpfDnsAnswerLarge{}))

	answerLarge = 1 << 31 // DNS_ANSWER_LARGE
)

// size sets the maps' sizes before they are made.
func (s AnswersSize) size(spec *ebpf.CollectionSpec) error {
	if s == (AnswersSize{}) {
		return nil
	}
	if s.Small < 1 || s.Large < 1 {
		return fmt.Errorf("size the cache of answers: %d small and %d large ones: there must be one of each", s.Small, s.Large)
	}
	spec.Maps[dnsbpfMapDnsAnswersSmall].MaxEntries = uint32(s.Small)
	spec.Maps[dnsbpfMapDnsAnswersLarge].MaxEntries = uint32(s.Large)
	spec.Maps[dnsbpfMapDnsAnswersUsed].MaxEntries = uint32(s.Small + s.Large)
	spec.Maps[dnsbpfMapDnsAnswersIndex].MaxEntries = uint32(s.Small + s.Large)
	if err := spec.Variables[dnsbpfVarCfgAnswersSmall].Set(uint32(s.Small)); err != nil {
		return fmt.Errorf("size the cache of answers: %w", err)
	}
	return nil
}

// Answers is the kernel programs' cache of answers. Its methods may be called from several goroutines.
type Answers struct {
	objects *dnsbpfObjects

	mu     sync.Mutex
	seed   uint64
	small  places
	large  places
	used   []uint64 // counts of uses: small ones first
	memory [][]byte // what is mapped
	taken  map[ready.Key]place
}

// places are the elements of one map.
type places struct {
	words []uint64 // shared with the kernel
	size  int      // of an element, in words
	free  []uint32
	first int    // of them in Answers.used
	bit   uint32 // in their numbers in the index
}

// place is where an answer is.
type place struct {
	in     *places
	number uint32
}

func (p place) words() []uint64 {
	return p.in.words[int(p.number)*p.in.size:][:p.in.size]
}

// Given says of an answer where and for how long it may be given.
type Given struct {
	Scopes []Scope
	Stored time.Duration // on Datapath.Now's clock: when its source gave it
	Life   time.Duration // and for how long it may be given then
	// Vouched answers are worthless some seconds after the daemon's last sign of life.
	Vouched bool
	// OPTSize is the UDP payload size in the OPT record, in octets. Zero repeats the asker's.
	OPTSize uint16
}

func newAnswers(objects *dnsbpfObjects) (a *Answers, err error) {
	a = &Answers{objects: objects, taken: make(map[ready.Key]place)}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if a.small, err = a.mapPlaces(objects.DnsAnswersSmall, smallSize); err != nil {
		return nil, err
	}
	if a.large, err = a.mapPlaces(objects.DnsAnswersLarge, largeSize); err != nil {
		return nil, err
	}
	a.large.first, a.large.bit = len(a.small.free), answerLarge
	a.used, err = a.mapWords(objects.DnsAnswersUsed, 8)
	return a, err
}

func (a *Answers) mapPlaces(m *ebpf.Map, size int) (places, error) {
	words, err := a.mapWords(m, size)
	p := places{words: words, size: size / 8}
	for i := range m.MaxEntries() {
		p.free = append(p.free, i)
	}
	slices.Reverse(p.free) // the first ones first, for who reads a dump
	return p, err
}

// mapWords maps an array into memory. The words are shared with running programs: they are written atomically, which also keeps
// the order of the stores on every CPU.
func (a *Answers) mapWords(m *ebpf.Map, size int) ([]uint64, error) {
	length := int(m.MaxEntries()) * size
	page := os.Getpagesize()
	memory, err := unix.Mmap(m.FD(), 0, (length+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", m, err)
	}
	a.memory = append(a.memory, memory)
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(memory))), length/8), nil
}

// close may be called for none.
func (a *Answers) close() error {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, memory := range a.memory {
		errs = append(errs, unix.Munmap(memory))
	}
	a.memory, a.taken = nil, nil
	return errors.Join(errs...)
}

// Answers returns the cache of answers. It is empty, and off.
func (d *Datapath) Answers() *Answers { return d.answers }

// Now reads the clock by which answers age.
func (d *Datapath) Now() (time.Duration, error) {
	now, err := coarseClock()
	return time.Duration(now), err
}

// AnswerQueries says whether queries are answered from the cache and replies offered, and the generation that queries from now on are
// marked with.
func (d *Datapath) AnswerQueries(on bool, generation uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	config, err := d.readConfig()
	if err != nil {
		return err
	}
	before := config
	config.Answers, config.Generation = 0, generation
	if on {
		config.Answers = 1
	}
	d.answers.mu.Lock()
	d.answers.seed = config.QuestionSeed
	d.answers.mu.Unlock()
	if config == before {
		return nil
	}
	return d.writeConfig(config)
}

// index is the key in dns_answers_index.
func (a *Answers) index(key ready.Key) uint64 {
	var name [256]byte
	copy(name[:], key.Name)
	typeBE := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, key.Type))
	hash := hashWord(a.seed, uint64(typeBE))
	for offset := 0; offset < len(key.Name); offset += 8 {
		hash = hashWord(hash, binary.LittleEndian.Uint64(name[offset:]))
	}
	return hashWord(hash, uint64(key.Asked))
}

// Put makes the kernel programs give an answer, in the place of a former one to the same question. ErrNoRoom is returned if there is
// none of its size left.
func (a *Answers) Put(answer *ready.Answer, given Given) error {
	data := answerData(answer)
	a.mu.Lock()
	defer a.mu.Unlock()
	in := &a.small
	if len(data) > smallSize-headSize {
		in = &a.large
	}
	if len(data) > largeSize-headSize {
		return fmt.Errorf("put an answer into the kernel: it has %d octets", len(data))
	}
	at, old := a.taken[answer.Key]
	if old && at.in != in {
		if err := a.drop(answer.Key, at); err != nil {
			return err
		}
		old = false
	}
	if !old {
		if len(in.free) == 0 {
			return ErrNoRoom
		}
		at = place{in, in.free[len(in.free)-1]}
	}
	write(at.words(), answerHead(answer, given), data)
	if old {
		return nil
	}
	atomic.StoreUint64(&a.used[in.first+int(at.number)], 0)
	if err := a.objects.DnsAnswersIndex.Put(a.index(answer.Key), at.number|in.bit); err != nil {
		return fmt.Errorf("write map dns_answers_index: %w", err)
	}
	in.free = in.free[:len(in.free)-1]
	a.taken[answer.Key] = at
	return nil
}

// Drop makes the kernel programs forget an answer, at once and for good. None is not an error.
func (a *Answers) Drop(key ready.Key) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.taken[key]
	if !ok {
		return nil
	}
	return a.drop(key, at)
}

func (a *Answers) drop(key ready.Key, at place) error {
	// The element first: a program that has looked up the index already must not find it, and if the index stays, nobody does.
	write(at.words(), dnsbpfDnsAnswer{}, nil)
	if err := a.objects.DnsAnswersIndex.Delete(a.index(key)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete from map dns_answers_index: %w", err)
	}
	delete(a.taken, key)
	at.in.free = append(at.in.free, at.number)
	return nil
}

// Uses returns how often an answer was given since the last call for it: exactly for none and one, else about.
func (a *Answers) Uses(key ready.Key) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.taken[key]
	if !ok {
		return 0
	}
	return atomic.SwapUint64(&a.used[at.in.first+int(at.number)], 0)
}

// Lost counts the replies that were not offered, since nobody took those before them.
func (d *Datapath) Lost() (lost uint64, err error) {
	var cpus []dnsbpfDnsScratch
	if err := d.objects.DnsScratch.Lookup(uint32(0), &cpus); err != nil {
		return 0, fmt.Errorf("read map dns_scratch: %w", err)
	}
	for _, cpu := range cpus {
		lost += cpu.OffersLost
	}
	return lost, nil
}

// answerData is an element without its head.
func answerData(answer *ready.Answer) []byte {
	data := append(make([]byte, 0, largeSize), answer.Name...)
	for len(data)%8 != 0 { // names are compared by words, and offsets are aligned
		data = append(data, 0)
	}
	for _, offset := range answer.TTLs {
		data = binary.NativeEndian.AppendUint16(data, offset)
	}
	return append(data, answer.Body...)
}

func answerHead(answer *ready.Answer, given Given) dnsbpfDnsAnswer {
	padded := (len(answer.Name) + 7) / 8 * 8
	head := dnsbpfDnsAnswer{
		StoredNs: uint64(given.Stored), LifeNs: uint64(given.Life), Sum: answer.Sum(),
		Qtype: answer.Type, Asked: uint16(answer.Asked), FlagsBe: networkOrder(answer.Flags), NameLength: uint16(len(answer.Name)),
		TtlsOff: uint16(padded), TtlsCount: uint16(len(answer.TTLs)), BodyOff: uint16(padded + 2*len(answer.TTLs)),
		BodyLength: uint16(len(answer.Body)), RunOff: answer.Run.Start, RunCount: answer.Run.Count, RunStride: answer.Run.Stride,
		OptSize: given.OPTSize,
	}
	for _, scope := range given.Scopes {
		head.Scopes |= 1 << scope
	}
	for i, count := range answer.Counts {
		head.CountsBe[i] = networkOrder(count)
	}
	if given.Vouched {
		head.Vouched = 1
	}
	return head
}

// networkOrder is htons().
func networkOrder(number uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, number))
}

// write replaces an element that programs may be reading: they see an odd sequence, or another one than before, and let it be.
func write(words []uint64, head dnsbpfDnsAnswer, data []byte) {
	element := make([]byte, headSize+(len(data)+7)/8*8)
	copy(element[headSize:], data)
	first := (*uint64)(unsafe.Pointer(unsafe.SliceData(words)))
	sequence := (*uint32)(unsafe.Pointer(first)) // the first field
	begun := atomic.LoadUint32(sequence) | 1
	atomic.StoreUint32(sequence, begun)
	copy(element[:headSize], unsafe.Slice((*byte)(unsafe.Pointer(&head)), headSize))
	// The first word with the sequence as it is, whole.
	binary.NativeEndian.PutUint32(element, begun)
	for i := range len(element) / 8 {
		atomic.StoreUint64(&words[i], binary.NativeEndian.Uint64(element[8*i:]))
	}
	atomic.StoreUint32(sequence, begun+1)
}

// Offer is a reply of an endpoint that was delivered, and that passed all checks.
type Offer struct {
	Replied    time.Duration // on Datapath.Now's clock
	Generation uint32        // of AnswerQueries, when the query was steered
	Asked      ready.Asked
	Message    []byte // valid until the next one
}

// How often Offers looks: the kernel wakes nobody, which would cost more than a query. Where there was something there is soon more,
// and until a name that many ask for is kept, each of them is steered.
const (
	offersPause = 20 * time.Millisecond
	offersSoon  = 2 * time.Millisecond
)

// Offers calls visit for each reply to a question that was asked before lately, until ctx ends or reading fails.
func (d *Datapath) Offers(ctx context.Context, visit func(Offer)) error {
	reader, err := ringbuf.NewReader(d.objects.DnsOffers)
	if err != nil {
		return fmt.Errorf("read map dns_offers: %w", err)
	}
	defer reader.Close()
	reader.SetDeadline(time.Unix(1, 0)) // what is there, and nothing to wait for
	next := time.NewTimer(offersPause)
	defer next.Stop()
	var record ringbuf.Record
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-next.C:
		}
		pause := offersPause
		for {
			if err := reader.ReadInto(&record); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				return fmt.Errorf("read map dns_offers: %w", err)
			}
			if offer, ok := parseOffer(record.RawSample); ok {
				visit(offer)
				pause = offersSoon
			}
		}
		next.Reset(pause)
	}
}

func parseOffer(sample []byte) (offer Offer, ok bool) {
	var head dnsbpfDnsOffer
	size := int(unsafe.Sizeof(head))
	if len(sample) < size {
		return offer, false
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&head)), size), sample)
	if len(sample)-size < int(head.Length) {
		return offer, false
	}
	return Offer{
		Replied: time.Duration(head.RepliedNs), Generation: head.Generation, Asked: ready.Asked(head.Asked),
		Message: sample[size:][:head.Length],
	}, true
}
