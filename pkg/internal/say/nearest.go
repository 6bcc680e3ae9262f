package say

// Nearest returns the one of names that takes the fewest changed letters to become name, if it takes few; none is "". Capitals count.
func Nearest(name string, names []string) string {
	best, limit := "", max(1, len(name)/3)
	for _, other := range names {
		if d := distance(name, other); d <= limit {
			best, limit = other, d-1
		}
	}
	return best
}

// distance is the Levenshtein distance of two short texts.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
