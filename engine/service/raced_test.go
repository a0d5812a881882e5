package service

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Folders that become links to the host's and back while they are read and written lead no transfer there: what a client
// gets has nothing of the host in it, and what it sends arrives in the sandbox or nowhere.
func TestTransfersRacedByLinks(t *testing.T) {
	d := running(t)
	root, first := d.newTree(t)
	free(t, d, first)
	made := d.tryFork(t, &boxwoodv1.ForkRequest{Scratch: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 1}}}) // no captures: many transfers
	if len(made) != 1 || made[0].GetError() != nil {
		t.Fatal(made)
	}
	sb := made[0].GetSandbox()
	defer free(t, d, sb)
	host := t.TempDir()
	if err := os.WriteFile(filepath.Join(host, "f"), []byte("the host's canary"), 0o644); err != nil {
		t.Fatal(err)
	}
	d.ok(t, sb.GetId(), "mkdir -p /w/d; echo own > /w/d/f; while :; do mv /w/d /w/e; ln -s "+host+" /w/d; rm /w/d; mv /w/e /w/d; done >/dev/null 2>&1 &")
	var sent bytes.Buffer
	w := tar.NewWriter(&sent)
	if err := w.WriteHeader(&tar.Header{Name: "d/sent", Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got := 0
	for range 40 {
		down, err := d.client.Download(ctx(t), &boxwoodv1.DownloadRequest{SandboxId: sb.GetId(), Path: "/w/d"})
		for err == nil {
			var m *boxwoodv1.DownloadResponse
			if m, err = down.Recv(); err == nil {
				got += len(m.GetChunk())
			}
			if bytes.Contains(m.GetChunk(), []byte("canary")) {
				t.Fatal("a download has what the host has")
			}
		}
		if r, err := d.client.ReadFile(ctx(t), &boxwoodv1.ReadFileRequest{SandboxId: sb.GetId(), Path: "/w/d/f"}); err == nil && string(r.GetContent()) != "own\n" {
			t.Fatalf("a file that is read has %q", r.GetContent())
		}
		up, err := d.client.Upload(ctx(t))
		if err == nil {
			err = up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Start{Start: &boxwoodv1.UploadStart{SandboxId: sb.GetId(), Path: "/w"}}})
		}
		if err == nil {
			err = up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Chunk{Chunk: sent.Bytes()}})
		}
		if err == nil {
			_, _ = up.CloseAndRecv() // it may meet the link
		}
		_, _ = d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sb.GetId(), Path: "/w/d/written", Content: []byte("x")})
	}
	if got == 0 {
		t.Error("nothing was ever read")
	}
	if left, err := os.ReadDir(host); err != nil || len(left) != 1 {
		t.Errorf("the host's folder has %v, %v", left, err)
	}
}
