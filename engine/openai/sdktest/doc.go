// Package sdktest shows that the official clients of OpenAI's and Anthropic's APIs work
// with the server as they are. It is a module of its own so that the project does not
// depend on them: run go test in this directory.
package sdktest
