// Conversations in the browser's IndexedDB. They never leave the browser unless the user exports them.

const STORE = "conversations";
let opening = null;

function database() {
  opening ||= new Promise((resolve, reject) => {
    const request = indexedDB.open("tokenmill", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function work(mode, action) {
  const transaction = (await database()).transaction(STORE, mode);
  return new Promise((resolve, reject) => {
    const request = action(transaction.objectStore(STORE));
    if (mode === "readwrite") transaction.commit(); // immediately: otherwise a change could be lost when the page is closed
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error || request.error);
  });
}

export const allConversations = async () =>
  (await work("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);
export const getConversation = (id) => work("readonly", (store) => store.get(id));
export const keepConversation = (conversation) => work("readwrite", (store) => store.put(conversation));
export const removeConversation = (id) => work("readwrite", (store) => store.delete(id));
