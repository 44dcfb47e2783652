// Search runs in a worker, which browsers refuse to a page that is opened from disk. There, a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      this.loaded = new Promise(done => script.addEventListener("load", done))
      script.src = new URL(url, document.baseURI)
      frame.contentDocument.head.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
