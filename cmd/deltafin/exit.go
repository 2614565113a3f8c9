package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"deltafin/engine"
	"deltafin/engine/disk"
	"deltafin/engine/hub"
)

// Exit codes, the same for every command.
const (
	exitFailed    = 1   // an operation failed: a read, a write
	exitUsage     = 2   // a wrong flag, argument, prompt or token id
	exitModel     = 3   // the checkpoint is missing, incomplete or damaged
	exitResources = 4   // not enough memory or disk
	exitCancelled = 130 // interrupted; what was produced until then stands
)

const exitCodes = `

Exit codes: 0 done; 1 an operation failed; 2 wrong flag, argument or prompt; 3 the model is missing,
incomplete or damaged; 4 not enough memory or disk; 130 interrupted.`

// failure is an error that knows its exit code.
type failure struct {
	code int
	err  error
}

func (f failure) Error() string { return f.err.Error() }
func (f failure) Unwrap() error { return f.err }

func usage(format string, args ...any) error { return failure{exitUsage, fmt.Errorf(format, args...)} }

func exitCode(err error) int {
	var f failure
	switch {
	case err == nil:
		return 0
	case errors.As(err, &f):
		return f.code
	case errors.Is(err, context.Canceled):
		return exitCancelled
	default:
		return exitFailed
	}
}

// openError gives what kept a model from opening its exit code.
func openError(err error) error {
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, engine.ErrMemory):
		return failure{exitResources, err}
	case errors.Is(err, syscall.EMFILE):
		return failure{exitFailed, fmt.Errorf("%w: raise the limit of open files (ulimit -n)", err)}
	case errors.Is(err, hub.ErrSource):
		return failure{exitFailed, err}
	default:
		return failure{exitModel, err}
	}
}

// generateError gives what ended a generation its exit code. A call that the system
// refused is a failed operation; all else comes from what the checkpoint holds.
func generateError(err error) error {
	var refused syscall.Errno
	if errors.As(err, &refused) || errors.Is(err, hub.ErrSource) {
		return failure{exitFailed, err}
	}
	return failure{exitModel, err}
}

// streamError gives what keeps a store from being filled, verified or repaired its exit code.
func streamError(err error) error {
	switch {
	case err == nil, errors.Is(err, context.Canceled), errors.Is(err, disk.ErrBusy), errors.Is(err, hub.ErrSource), disk.Full(err),
		errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return spaceError(err)
	}
	return failure{exitModel, err}
}

// spaceError gives errors for want of space their exit code.
func spaceError(err error) error {
	if disk.Full(err) {
		return failure{exitResources, err}
	}
	return err
}
