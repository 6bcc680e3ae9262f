// Package resolvconf reads the host's /etc/resolv.conf, says who owns it, puts
// a temporary one in its place, keeps it there when others write, and puts the
// original back.
//
// The original is never copied and deleted: renameat2(2) RENAME_EXCHANGE swaps
// it with ours in one step, so it keeps its inode, times, label and link text,
// and there is no moment without the file. It then lies beside ours under
// [ParkedName]. A copy of it is in the journal, synced before the swap, for the
// case that the parked one is lost.
//
// The steps of a takeover are: classify the file, record it, write ours,
// exchange the two, confirm that in the journal; of a restoration: judge whose
// file it is, put the original back, verify, forget. Tests stop at each.
//
// All of this is for Linux; elsewhere there is what reads and writes the text of such a file.
package resolvconf
