package discovery

import (
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) {
	RedirectKlog(zap.NewNop()) // what client-go says about provoked failures
	goleak.VerifyTestMain(m)
}
